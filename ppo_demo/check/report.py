"""Hold a function against the right one, look for the fault that fits, and report."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, get_args

import numpy as np

from ppo_demo._checks import one_of, require
from ppo_demo.check.engine import (
    Example,
    Fault,
    Floats,
    Library,
    Outcome,
    Subject,
    UserError,
    evaluate,
)


@dataclass(frozen=True)
class Report:
    """What a check found: true if all holds, readable as text.

    Attributes
    ----------
    title : str
        What was checked.
    held : tuple of str
        Examples on which both agree.
    failed : tuple of str
        Those on which they do not.
    causes : tuple of str
        The known faults that give just what was found, on every example; of a pair, "a; and b".
    notes : tuple of str
        Conventions, and what else there is to say.
    left_out : tuple of str
        What was not asked for.
    """

    title: str
    held: tuple[str, ...]
    failed: tuple[str, ...]
    causes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return not self.failed

    def __repr__(self) -> str:
        # What fits comes first: test runners cut the middle of a long text.
        lines = [f"{self.title}: {'differs' if self.failed else 'agrees'}"]
        lines += [f"  what fits: {cause}" for cause in self.causes]
        lines += [f"  holds   {name}" for name in self.held]
        lines += [f"  FAILS   {name}" for name in self.failed]
        lines += [f"  {note}" for note in self.notes]
        return "\n".join([*lines, *(f"  not tried: {name}" for name in self.left_out)])


OPTIONS = {"live": "constants=True", "half": "half=True"}
"""What is tried on demand alone: attributes of examples that ask for it, and how a caller does."""


def compare(
    function: Callable[..., Any],
    subject: Subject,
    library: Library = "torch",
    *,
    constants: bool = False,
    half: bool = False,
) -> Report:
    """Hold a function against the right one, and look for the fault that fits.

    Parameters
    ----------
    function : callable
        What is checked.
    subject : Subject
        What it should be.
    library : {"torch", "numpy", "jax"}
        What arrays it takes.
    constants, half : bool
        Also try what is passed with a gradient though it is a constant, and half precision.

    Returns
    -------
    Report
        What was found.

    Raises
    ------
    TypeError
        If it cannot be called.
    ValueError
        If the library is unknown or not installed.
    """
    if not callable(function):
        raise TypeError(f"the function to check must be one, got {function!r}")
    one_of(get_args(Library), library=library)
    require("library", library, find_spec(library), "one that is installed")
    title = f"{subject.title}, in {library}"
    asked = {"live": constants and library != "numpy", "half": half}
    tried = [e for e in subject.examples if all(asked[k] or not getattr(e, k) for k in asked)]
    found: dict[str, Outcome] = {}
    for example in tried:
        try:
            with np.errstate(all="ignore") if library == "numpy" else nullcontext():
                found[example.name] = evaluate(function, example, library)
        except UserError as error:
            given = ", ".join(f"{k} of shape {v.shape}" for k, v in example.given.items())
            note = f"on {example.name!r} {error} ({given})"
            return Report(title, tuple(found), (example.name,), notes=(note,))
    left = tuple(
        f"{e.name} (ask for it with {OPTIONS[k]})"
        for e in subject.examples
        for k in asked
        if getattr(e, k) and e not in tried and not (library == "numpy" and e.live)
    )
    # Finite differences see through what is held constant, gradients do not: faults are made in
    # a library of the same kind, PyTorch where there is a choice, since it is faster at this size.
    kind: Library = "torch" if library == "jax" and find_spec("torch") else library
    right = {e.name: _outcome(subject, kind, (), e) for e in tried}
    yours = {name: outcome.vector for name, outcome in found.items()}
    failed = tuple(e.name for e in tried if not _alike(yours, right, [e]))
    if not failed:
        return Report(title, tuple(found), (), left_out=left)
    fits, factor = _search(subject, kind, tried, yours, failed)
    told = list(dict.fromkeys(fault for faults in fits for fault in faults))
    notes = [f"convention: {fault.name}" for fault in told if fault.convention]
    if factor != 1:
        notes.append(f"convention: {factor:.6g} times ours; the learning rate could do the same")
    told = [fault for fault in told if not fault.convention]
    if not told and notes:
        return Report(title, tuple(found), (), notes=tuple(notes), left_out=left)
    example = min((e for e in tried if e.name in failed), key=_size)
    if fits:
        notes += _against(example.name, found, right)
        notes += [f"{f.name}: {f.effect}. One notices: {f.sign}." for f in told]
    else:
        notes = _by_element(example, found[example.name], right[example.name])
    return Report(
        title,
        tuple(name for name in found if name not in failed),
        failed,
        causes=tuple("; and ".join(f.name for f in n if not f.convention) for n in fits),
        notes=tuple(notes),
        left_out=left,
    )


Vectors = Mapping[str, Floats]
Outcomes = Mapping[str, Outcome]


def _search(
    subject: Subject, library: Library, tried: list[Example], yours: Vectors, failed: Iterable[str]
) -> tuple[list[tuple[Fault, ...]], float]:
    """Return the faults that fit, alone or in pairs, and by what factor they do."""
    # The smallest on which something is wrong rules most faults out.
    order = sorted(tried, key=lambda e: (e.name not in failed, _size(e)))

    def outcomes(faults: tuple[Fault, ...]) -> dict[str, Outcome]:
        return {e.name: _outcome(subject, library, faults, e) for e in tried}

    def fit(faults: tuple[Fault, ...]) -> bool:
        return all(
            _alike(yours, {e.name: _outcome(subject, library, faults, e)}, [e]) for e in order
        )

    if factor := _factor(yours, outcomes(()), tried):
        return [()], factor
    for size in (1, 2):
        found = [faults for faults in subject.combinations(size) if fit(faults)]
        harmless = [faults for faults in found if all(f.convention for f in faults)]
        if found:  # what is another way to say the same is no fault
            return harmless or found, 1.0
        if size == 1:
            every = list(subject.combinations(1))
            factors = [_factor(yours, outcomes(faults), tried) for faults in every]
            if factor := next((f for f in factors if f), None):
                return [n for n, f in zip(every, factors, strict=True) if f], factor
    return [], 1.0


@cache
def _outcome(
    subject: Subject, library: Library, faults: tuple[Fault, ...], example: Example
) -> Outcome:
    """Return what the right function with these faults gives; it is computed once."""
    function = subject.changed(faults) if faults else subject.right
    with np.errstate(all="ignore"):
        return evaluate(function, example, library, wide=True)


def _alike(
    yours: Vectors, theirs: Outcomes, examples: Iterable[Example], factor: float = 1.0
) -> bool:
    """Tell whether one is that multiple of the other on these examples."""

    def same(example: Example) -> bool:
        tolerance = 2e-2 if example.half else 1e-5
        bounds = {"rtol": tolerance, "atol": 0.1 * tolerance * factor}
        wanted = factor * theirs[example.name].vector
        return bool(np.isclose(yours[example.name], wanted, **bounds, equal_nan=True).all())

    return all(same(example) for example in examples)


def _factor(yours: Vectors, theirs: Outcomes, tried: list[Example]) -> float | None:
    """Return by what factor above 0 one is a multiple of the other; None if it is not."""
    mine = np.concatenate([yours[e.name] for e in tried])
    other = np.concatenate([theirs[e.name].vector for e in tried])
    usable = np.isfinite(mine) & np.isfinite(other)
    square = other[usable] @ other[usable]
    factor = float(mine[usable] @ other[usable] / square) if square > 1e-12 else 0.0
    return factor if factor > 0 and _alike(yours, theirs, tried, factor) else None


def _size(example: Example) -> int:
    mask = example.given.get("mask")
    return int(mask.sum()) if mask is not None else next(iter(example.given.values())).size


def _against(name: str, found: Outcomes, right: Outcomes) -> list[str]:
    mine, ours = found[name].value, right[name].value
    if mine.shape or not (mine or ours):
        return []
    said = f"on {name!r} your value is {mine:.6g}, ours {ours:.6g}"
    share = mine / ours if ours else np.nan
    return [f"{said}: {share:.4g} of it" if np.isfinite(share) else said]


def _by_element(example: Example, mine: Outcome, ours: Outcome) -> list[str]:
    """Say that nothing fits, and show where two functions differ, element by element."""
    lines = [f"no known fault fits. The smallest batch that shows it, {example.name!r}:"]
    if not example.shape:
        lines.append(f"your value {mine.value:.6g}, ours {ours.value:.6g}; by element")
    columns = {name: value for name, value in example.given.items() if name != "mask"}
    if example.shape:
        columns |= {"your value": mine.value, "our value": ours.value}
    if mine.gradient.size:
        columns |= {"your gradient": mine.gradient, "our gradient": ours.gradient}
    shape = example.given[example.by].shape if mine.gradient.size else example.shape
    columns = {k: v for k, v in columns.items() if v.shape == shape}
    lines.append("  ".join(f"{name:>13}" for name in columns))
    mask = example.given.get("mask", np.ones(shape))
    places = list(zip(*np.nonzero(mask), strict=True))[:20] if mask.shape == shape else []
    rows = ([column[place] for column in columns.values()] for place in places)
    return [*lines, *("  ".join(f"{number:13.5g}" for number in row) for row in rows)]
