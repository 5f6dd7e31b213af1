"""What every check is made of: examples, faults, and what a function gives on them."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, combinations
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[Any]
Library = Literal["torch", "numpy", "jax"]


@dataclass(frozen=True, eq=False)
class Example:
    """What a function is tried on.

    Attributes
    ----------
    name : str
        What it shows.
    given : dict of str to array
        The arguments, in the order of the call; float64, int64 or bool.
    shape : tuple of int
        Of what is to be returned; () is one number.
    by : str
        The argument that the gradient is taken by; none if empty.
    live : str
        An argument that is passed with its gradient attached, though it is a constant.
    half : bool
        Real numbers are passed in float16.
    """

    name: str
    given: Mapping[str, Floats]
    shape: tuple[int, ...] = ()
    by: str = ""
    live: str = ""
    half: bool = False


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong, or a convention that differs.

    Attributes
    ----------
    name : str
        What is wrong, as a sentence.
    effect, sign : str
        What it does in training, and how one notices.
    change : callable
        Takes what the check was asked for, such as a row; returns the parts of the right function
        to replace, none where the fault cannot occur.
    convention : bool
        It is no fault: another way to say the same.
    """

    name: str
    effect: str
    sign: str
    change: Callable[..., Mapping[str, Any]] = field(compare=False)
    convention: bool = False


@dataclass(frozen=True, eq=False)
class Subject:
    """What is checked, and all that can go wrong with it.

    Attributes
    ----------
    title : str
        As the report names it.
    right : callable
        Called as the function that is checked.
    build : callable
        Takes changed parts by name, returns such a function.
    faults : tuple of Fault
        Those that are looked for.
    asked : object
        What `Fault.change` is called with.
    examples : tuple of Example
        What functions are tried on, from the plainest to the most demanding.
    """

    title: str
    right: Callable[..., Any]
    build: Callable[..., Callable[..., Any]]
    faults: tuple[Fault, ...]
    asked: Any
    examples: tuple[Example, ...]

    def combinations(self, size: int) -> Iterator[tuple[Fault, ...]]:
        """Yield each fault that can occur alone, or each two that can go together."""
        single = {fault: change for fault in self.faults if (change := fault.change(self.asked))}
        for faults in combinations(single, size):
            keys = [key for fault in faults for key in single[fault]]
            if len(keys) == len(set(keys)):
                yield faults

    def changed(self, faults: Iterable[Fault]) -> Callable[..., Any]:
        """Return the right function with these faults."""
        changes = [fault.change(self.asked).items() for fault in faults]
        return self.build(**dict(chain.from_iterable(changes)))


class UserError(Exception):
    """The function raised, or returned something of another kind or shape."""


# --- what a function gives ---


@dataclass(frozen=True)
class Outcome:
    """What a function gave on an example: its value, and the gradient by one argument."""

    value: Floats
    gradient: Floats

    @property
    def vector(self) -> Floats:
        """Both as one row; a gradient says nothing where the value is NaN."""
        spoilt = np.isnan(self.value).any()
        gradient = np.full_like(self.gradient, np.nan) if spoilt else self.gradient
        return np.concatenate([self.value.ravel(), gradient.ravel()])


def evaluate(
    function: Callable[..., Any], example: Example, library: Library, *, wide: bool = False
) -> Outcome:
    """Return a function's value and gradient on an example.

    Parameters
    ----------
    function : callable
        Called with the example's arrays.
    example : Example
        What to try it on.
    library : {"torch", "numpy", "jax"}
        What arrays it takes.
    wide : bool
        Pass what is of half precision as float32 of the same value.

    Raises
    ------
    UserError
        If it raises, or returns what it should not.
    """
    given = {}
    for name, value in example.given.items():
        narrow = example.half and value.dtype.kind == "f"
        value = value.astype(np.float16) if narrow else value.copy()
        given[name] = value.astype(np.float32) if narrow and wide else value
    value, slope = _BY[library](function, example, given)
    value, slope = (np.asarray(x, dtype=np.float64) for x in (value, slope))
    mask = given.get("mask")
    if mask is not None and mask.shape == example.shape:
        value = np.where(mask, value, 0)  # what stands on padding is read by nobody
    return Outcome(value, slope)


def _weights(shape: tuple[int, ...]) -> Floats:
    """Weights that make one number of many, so that it has a gradient."""
    return np.random.default_rng(5).uniform(0.5, 1.5, shape) if shape else np.ones(())


def _by_torch(
    function: Callable[..., Any], example: Example, given: Mapping[str, Floats]
) -> tuple[Any, Any]:
    import torch

    arrays = {name: torch.from_numpy(value) for name, value in given.items()}
    if not example.by:
        found = _call(function, example, arrays, torch.Tensor)
        return found.detach().double(), np.zeros(0)
    leaf = arrays[example.by].requires_grad_()
    if example.live:
        arrays[example.live] = arrays[example.live] + (leaf - leaf.detach())
    found = _call(function, example, arrays, torch.Tensor)
    value = found.detach().double()
    if not found.requires_grad:
        return value, np.zeros(leaf.shape)
    one = (found.double() * torch.from_numpy(_weights(tuple(found.shape)))).sum()
    (slope,) = torch.autograd.grad(one, leaf, materialize_grads=True)
    return value, slope.double()


def _by_jax(
    function: Callable[..., Any], example: Example, given: Mapping[str, Floats]
) -> tuple[Any, Any]:
    import jax

    with jax.enable_x64(True):
        arrays = {name: jax.numpy.asarray(value) for name, value in given.items()}
        if not example.by:
            return _call(function, example, arrays, jax.Array), np.zeros(0)

        def one(leaf: Any) -> tuple[Any, Any]:
            live = {}
            if example.live:
                live = {example.live: arrays[example.live] + (leaf - jax.lax.stop_gradient(leaf))}
            found = _call(function, example, {**arrays, example.by: leaf, **live}, jax.Array)
            number = (found.astype("float64") * _weights(tuple(found.shape))).sum()
            return number, jax.lax.stop_gradient(found)

        slope, value = jax.grad(one, has_aux=True)(arrays[example.by])
        return np.asarray(value), np.asarray(slope)


def _by_differences(
    function: Callable[..., Any], example: Example, given: Mapping[str, Floats]
) -> tuple[Any, Any]:
    def at(change: Any) -> Any:
        arrays = {k: v + change if k == example.by else v.copy() for k, v in given.items()}
        return np.asarray(_call(function, example, arrays, (np.ndarray, np.floating, float)))

    if not example.by or example.half:  # too coarse for differences
        return at(0), np.zeros(0)
    value, slope = at(0), np.zeros(given[example.by].shape)
    weights = _weights(value.shape)
    for place in zip(*np.nonzero(np.isfinite(given[example.by])), strict=True):
        step = np.zeros_like(slope)
        step[place] = 1e-6
        slope[place] = ((at(step) - at(-step)) * weights).sum() / 2e-6
    return value, slope


_BY = {"torch": _by_torch, "jax": _by_jax, "numpy": _by_differences}


def _call(
    function: Callable[..., Any], example: Example, arrays: Mapping[str, Any], kind: Any
) -> Any:
    """Call the function; refuse what is not of the right kind and shape."""
    try:
        found = function(*arrays.values())
    except Exception as error:
        raise UserError(f"it raised {type(error).__name__}: {error}") from error
    if found is None:
        raise UserError("it returned None: is there a `return`?")
    if not isinstance(found, kind):
        lost = ", which has no gradient" if isinstance(found, float) else ""
        raise UserError(f"it returned {type(found).__name__}{lost}")
    shape, wanted = tuple(getattr(found, "shape", ())), example.shape
    if "int" in str(getattr(found, "dtype", "")):
        raise UserError(f"it returned integers: {found}")
    if shape == wanted or (shape, wanted) == ((1,), ()):
        return found
    hint = ""
    if not wanted:
        hint = ": take a mean"
    elif shape[:-1] == wanted:
        hint = ": take the entry of the token that was chosen, or sum over the last axis"
    elif len(shape) < len(wanted):
        hint = ": it was summed or averaged"
    said = f"shape {wanted}" if wanted else "one number"
    raise UserError(f"it returned shape {shape} where {said} is wanted{hint}")
