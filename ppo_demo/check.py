"""Hold a loss of your own against the book's: what agrees, what does not, and which fault fits.

    from ppo_demo import check

    check.policy_loss(my_loss)

A report is true if all holds, so it can stand in an `assert`, and reads as text.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import combinations
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ppo_demo._arrays import as_mask, keep, log_ratio, namespace, safe_exp, stop_gradient
from ppo_demo._checks import one_of, require
from ppo_demo.aggregation import aggregate, masked_mean
from ppo_demo.algorithms import ALGORITHMS
from ppo_demo.losses import Algorithm, Batch, losses
from ppo_demo.surrogates import RATIOS, Clip, DualClip, SoftGate

Floats = npt.NDArray[np.float64]
Loss = Callable[[Any, Any, Any, Any], Any]
LENGTH = 6
"""Limit on a completion, for a mean over one fixed length."""

# --- what is tried ---


@dataclass(frozen=True, eq=False)
class Example:
    """A batch to try a loss on.

    Attributes
    ----------
    name : str
        What it shows.
    log_probs, old_log_probs, advantages : array, shape (B, T)
        As a loss takes them.
    mask : array of bool, same shape
        True on the completions' tokens.
    live : {"", "old", "advantages"}
        What is passed with its gradient attached, though it is a constant; PyTorch alone.
    """

    name: str
    log_probs: Floats
    old_log_probs: Floats
    advantages: Floats
    mask: npt.NDArray[np.bool_]
    live: Literal["", "old", "advantages"] = ""


def examples(narrow: float = 1.0) -> list[Example]:
    """Return the batches that a policy loss is tried on.

    Parameters
    ----------
    narrow : float
        Log-ratios are multiplied by it: a row with a narrow clip range is tried within its reach.

    Returns
    -------
    list of Example
        From the plainest to the most demanding.
    """
    chance = np.random.default_rng(11)
    whole = np.ones((3, 4), dtype=bool)
    ragged = np.arange(5) < np.array([[5], [2], [3]])

    def make(name: str, mask: Any, low: float, high: float, sign: int = 0, **more: Any) -> Example:
        shape = mask.shape
        old = -chance.uniform(0.5, 2.0, shape)
        advantages = np.repeat(chance.uniform(0.4, 1.6, (shape[0], 1)), shape[1], 1)
        advantages *= sign or np.resize([1, -1], (shape[0], 1))
        new = old + narrow * chance.uniform(low, high, shape)
        return Example(name, new, old, advantages, mask, **more)

    one = np.ones((1, 1), dtype=bool)
    made = [
        make("first update", whole, 0, 0),
        make("one token", one, 0.05, 0.1, 1),
        make("within the clip range", whole, -0.15, 0.15),
        make("beyond it above, good", whole, 0.3, 0.9, 1),
        make("beyond it below, good", whole, -0.9, -0.35, 1),
        make("beyond it above, bad", whole, 0.3, 0.9, -1),
        make("beyond it below, bad", whole, -0.9, -0.35, -1),
        make("far beyond it above, bad", whole, 1.2, 1.5, -1),
        make("completions of several lengths", ragged, -0.6, 0.6),
        make("the old policy given as the same tensor", ragged, 0, 0, live="old"),
        make("advantages with a gradient", ragged, -0.6, 0.6, live="advantages"),
    ]
    dirty = make("garbage on padding", ragged, -0.6, 0.6)
    garbage = np.where(ragged, 0, np.nan)
    return [
        *made,
        replace(
            dirty,
            log_probs=dirty.log_probs + garbage,
            old_log_probs=dirty.old_log_probs + garbage,
            advantages=dirty.advantages + garbage,
        ),
    ]


@dataclass(frozen=True)
class Outcome:
    """What a loss gave on an example: its value, and the gradient on the log-probabilities."""

    value: float
    gradient: Floats

    def close(self, other: "Outcome", tolerance: float) -> bool:
        """Whether both agree; values of NaN do, whatever their gradients."""
        if np.isnan(self.value) and np.isnan(other.value):
            return True
        same = partial(np.allclose, rtol=tolerance, atol=tolerance, equal_nan=True)
        return same(self.value, other.value) and same(self.gradient, other.gradient)

    def scaled(self, factor: float) -> "Outcome":
        """Return a multiple."""
        return Outcome(factor * self.value, factor * self.gradient)


class LossError(Exception):
    """A loss raised, or returned something that is no number."""


def evaluate(loss: Loss, example: Example, library: str) -> Outcome:
    """Return a loss's value and gradient on an example.

    Raises
    ------
    LossError
        If it raises, or returns what is no single number.
    """
    return (_by_torch if library == "torch" else _by_differences)(loss, example)


def _by_torch(loss: Loss, example: Example) -> Outcome:
    import torch

    leaf = torch.from_numpy(example.log_probs.copy()).requires_grad_()
    old = leaf if example.live == "old" else torch.from_numpy(example.old_log_probs.copy())
    advantages = torch.from_numpy(example.advantages.copy())
    if example.live == "advantages":
        advantages = advantages + (leaf - leaf.detach())
    found = _number(loss, leaf, old, advantages, torch.from_numpy(example.mask.copy()))
    if not isinstance(found, torch.Tensor):
        raise LossError(f"it returned {type(found).__name__}, which has no gradient")
    if not found.requires_grad:
        return Outcome(found.item(), np.zeros_like(example.log_probs))
    (slope,) = torch.autograd.grad(found, leaf, materialize_grads=True)
    return Outcome(found.item(), slope.numpy())


def _by_differences(loss: Loss, example: Example) -> Outcome:
    given = (example.old_log_probs, example.advantages, example.mask)

    def at(logs: Floats) -> float:
        return float(_number(loss, logs, *(x.copy() for x in given)))

    value, slope = at(example.log_probs.copy()), np.zeros_like(example.log_probs)
    for place in zip(*np.nonzero(np.isfinite(example.log_probs)), strict=True):
        step = np.zeros_like(slope)
        step[place] = 1e-6
        slope[place] = (at(example.log_probs + step) - at(example.log_probs - step)) / 2e-6
    return Outcome(value, slope)


def _number(loss: Loss, *given: Any) -> Any:
    try:
        found = loss(*given)
    except Exception as error:
        raise LossError(f"it raised {type(error).__name__}: {error}") from error
    if found is None:
        raise LossError("it returned None: is there a `return`?")
    shape = tuple(getattr(found, "shape", ()))
    if shape not in ((), (1,)):
        raise LossError(f"it returned shape {shape} where one number is wanted: take a mean")
    if "int" in str(getattr(found, "dtype", type(found).__name__)):
        raise LossError(f"it returned an integer, {found}")
    return found


# --- the right loss in parts, and what goes wrong with each ---


@dataclass(frozen=True)
class Parts:
    """A policy loss, taken apart so that faults can be put into it.

    Attributes
    ----------
    ratio : callable
        Takes log-probabilities, old ones and the mask.
    objective : callable
        Takes ratio, advantages and log-probabilities.
    mean : callable
        Takes an objective for each token and the mask.
    mask : callable
        What is made of the mask first.
    guard : callable
        What is made of everything on padding.
    constant : callable
        What is made of the old log-probabilities.
    fixed : callable
        What is made of the advantages.
    factor : float
        What the mean is multiplied by: −1, since an objective is maximised.
    """

    ratio: Callable[..., Any]
    objective: Callable[..., Any]
    mean: Callable[..., Any]
    mask: Callable[..., Any] = lambda mask: mask
    guard: Callable[..., Any] = keep
    constant: Callable[..., Any] = stop_gradient
    fixed: Callable[..., Any] = stop_gradient
    factor: float = -1.0

    def __call__(self, log_probs: Any, old: Any, advantages: Any, mask: Any) -> Any:
        """Return the loss."""
        mask = self.mask(as_mask(mask, log_probs.shape))
        advantages, old = self.fixed(advantages), self.constant(old)
        logs, old, advantages = (self.guard(x, mask) for x in (log_probs, old, advantages))
        objective = self.objective(self.ratio(logs, old, mask), advantages, logs)
        # Rules take advantages for constants; all are proportional to their size.
        xp, none = namespace(logs), advantages == 0
        objective = objective * xp.where(
            none, 1, advantages / stop_gradient(xp.where(none, 1, advantages))
        )
        return self.factor * self.mean(objective + namespace(logs).zeros_like(logs), mask)


def parts(row: Algorithm) -> Parts:
    """Return the policy loss of a row in parts; put together they are `losses`."""
    length = LENGTH if row.aggregation == "fixed" else None
    return Parts(
        ratio=_live(row.ratio),
        objective=row.clip,
        mean=partial(aggregate, how=row.aggregation, length=length),
    )


def _live(kind: str) -> Callable[..., Any]:
    """One of `RATIOS`, that holds nothing constant by itself."""

    def ratio(logs: Any, old: Any, mask: Any) -> Any:
        xp = namespace(logs)
        gap = log_ratio(logs, old)
        if kind == "token":
            return safe_exp(gap)
        total = xp.sum(gap, axis=-1, keepdims=True)
        count = xp.sum(xp.astype(mask, logs.dtype), axis=-1, keepdims=True)
        return safe_exp(total if kind == "product" else total / count)

    return RATIOS["none"] if kind == "none" else ratio


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong in a policy loss, or a convention that differs.

    Attributes
    ----------
    name : str
        What is wrong, as a sentence.
    effect, sign : str
        What it does in training, and how one notices.
    change : callable
        Takes a row; returns the changed fields of its `Parts`, nothing where it cannot occur.
    convention : bool
        It is no fault: another way to say the same.
    """

    name: str
    effect: str
    sign: str
    change: Callable[[Algorithm], Mapping[str, Any]]
    convention: bool = False


def _for_clip(
    make: Callable[[Any], Callable[..., Any]],
) -> Callable[[Algorithm], Mapping[str, Any]]:
    """Change the objective of rows that clip."""
    return lambda row: {"objective": make(row.clip)} if type(row.clip) is Clip else {}


def _clip(rule: Any, ratio: Any) -> Any:
    return namespace(ratio).clip(ratio, 1 - rule.clip_range, 1 + rule.high)


def _where(rule: Callable[[Algorithm], bool], **change: Any) -> Callable[[Algorithm], Any]:
    return lambda row: change if rule(row) else {}


def _without_last(mask: Any) -> Any:
    xp = namespace(mask)
    after = xp.concat([mask[:, 1:], xp.zeros_like(mask[:, :1])], axis=1)
    alone = xp.sum(xp.astype(mask, xp.int64), axis=1, keepdims=True) == 1
    return mask & (after | alone)


def _times_mask(objective: Any, mask: Any) -> Any:
    xp = namespace(objective)
    real = xp.astype(mask, objective.dtype)
    return xp.sum(objective * real) / xp.sum(real)


FAULTS = (
    Fault(
        "the mean runs over padding too",
        "what stands on padding is learned from, and real tokens count for less",
        "the loss changes when a batch is padded further",
        _where(
            lambda row: row.aggregation == "token",
            guard=lambda x, _: x,
            mean=lambda x, _: namespace(x).mean(x),
        ),
    ),
    Fault(
        "the sum over real tokens is divided by all places, padding too",
        "short completions make the steps smaller",
        "the loss changes when a batch is padded further",
        _where(
            lambda row: row.aggregation == "token",
            mean=lambda x, mask: namespace(x).mean(keep(x, mask)),
        ),
    ),
    Fault(
        "padding is multiplied by 0, not left out",
        "one NaN or infinity on padding spoils the whole batch",
        "NaN losses that come with longer padding",
        _where(lambda row: row.aggregation == "token", guard=lambda x, _: x, mean=_times_mask),
    ),
    Fault(
        "the last token of each completion is masked out",
        "the end of an answer is never learned: completions get longer",
        "a single-token completion has no gradient, or the length runs away",
        lambda _: {"mask": _without_last},
    ),
    Fault(
        "the maximum is taken where the minimum belongs",
        "a ratio that has run away is pushed on, one that went wrong is left there",
        "the clip fraction and the KL rise together",
        _for_clip(lambda rule: lambda r, a, _: namespace(r).maximum(r * a, _clip(rule, r) * a)),
    ),
    Fault(
        "the ratio is clipped without the minimum",
        "a token that went the wrong way and left the range is never brought back",
        "bad tokens that stay likely",
        _for_clip(lambda rule: lambda r, a, _: _clip(rule, r) * a),
    ),
    Fault(
        "the minimum is taken before the advantage is multiplied in",
        "with a negative advantage the wrong side is clipped",
        "bad tokens beyond the upper bound get no push down",
        _for_clip(lambda rule: lambda r, a, _: namespace(r).minimum(r, _clip(rule, r)) * a),
    ),
    Fault(
        "the product of ratio and advantage is clipped, not the ratio",
        "advantages themselves are held to about 1",
        "the loss on the first batch is not the mean advantage",
        _for_clip(lambda rule: lambda r, a, _: namespace(r).minimum(r * a, _clip(rule, r * a))),
    ),
    Fault(
        "nothing is clipped",
        "steps after the first on a batch may go anywhere",
        "the approximate KL of a batch has no bound",
        _for_clip(lambda _: lambda r, a, __: r * a),
    ),
    Fault(
        "the sign is that of an objective: it is maximised when it is minimised",
        "training makes good answers rarer",
        "the reward falls from the first batches on",
        lambda _: {"factor": 1.0},
    ),
    Fault(
        "the old log-probabilities are not constants",
        "where they are the same tensor, nothing is learned at all",
        "a gradient of exactly 0 on the first mini-batch",
        _where(lambda row: type(row.clip) in (Clip, DualClip, SoftGate), constant=lambda old: old),
    ),
    Fault(
        "the old log-probabilities are those of the new policy",
        "every ratio is 1 and nothing is ever clipped",
        "a clip fraction of 0 on every batch",
        lambda row: (
            {"ratio": lambda logs, _, mask: _live(row.ratio)(logs, stop_gradient(logs), mask)}
            if row.ratio != "none"
            else {}
        ),
    ),
    Fault(
        "the advantages are not constants",
        "the policy is also pushed to change what it is judged by",
        "the gradient differs when advantages are detached",
        lambda _: {"fixed": lambda advantages: advantages},
    ),
    Fault(
        "the ratio is a difference of logarithms, without the exponential",
        "on the first batch it is 0 instead of 1",
        "the first loss is 0, and all is clipped",
        _where(lambda row: row.ratio == "token", ratio=lambda logs, old, _: log_ratio(logs, old)),
    ),
    Fault(
        "the ratio is upside down",
        "tokens that became likelier count as rarer: the push has the wrong sign",
        "the reward falls from the first batches on",
        lambda row: (
            {"ratio": lambda logs, old, mask: 1 / _live(row.ratio)(logs, old, mask)}
            if row.ratio != "none"
            else {}
        ),
    ),
    Fault(
        "the ratio of a completion is the product of its tokens', not their mean",
        "the clip acts on nearly every long completion",
        "a clip fraction near 1",
        _where(lambda row: row.ratio == "sequence", ratio=_live("product")),
    ),
    Fault(
        "the mean is over all tokens where each completion has its own",
        "long completions count for more than the algorithm says",
        "the loss changes when a batch is cut into completions differently",
        _where(lambda row: row.aggregation == "sequence", mean=masked_mean),
    ),
    Fault(
        "each completion has a mean of its own where it is over all tokens",
        "tokens of long completions count for less: long wrong answers are cheap",
        "wrong answers get longer",
        _where(lambda row: row.aggregation == "token", mean=partial(aggregate, how="sequence")),
    ),
    Fault(
        "the sum over the tokens, not their mean",
        "the learning rate depends on how many tokens a batch has",
        "a gradient norm that grows with the batch",
        _where(
            lambda row: row.aggregation == "token",
            mean=lambda x, mask: namespace(x).sum(keep(x, mask)),
        ),
        convention=True,
    ),
    Fault(
        "a dual clip at 3",
        "bad tokens that became very likely are not pushed without bound",
        "none: it is an option of several libraries",
        lambda row: (
            {"objective": DualClip(row.clip.clip_range, row.clip.clip_range_high, dual_clip=3.0)}
            if type(row.clip) is Clip and 0.1 < row.clip.clip_range <= row.clip.high < 2
            else {}
        ),
        convention=True,
    ),
)
"""What is known to go wrong in policy losses, and conventions that are no faults."""


# --- the report ---


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
    """

    title: str
    held: tuple[str, ...]
    failed: tuple[str, ...]
    causes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return not self.failed

    def __repr__(self) -> str:
        # What fits comes first: test runners cut the middle of a long text.
        lines = [f"{self.title}: {'differs' if self.failed else 'agrees'}"]
        lines += [f"  what fits: {cause}" for cause in self.causes]
        lines += [f"  holds   {name}" for name in self.held]
        lines += [f"  FAILS   {name}" for name in self.failed]
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])


def policy_loss(
    loss: Loss,
    algorithm: str | Algorithm = "ppo",
    *,
    library: Literal["torch", "numpy"] = "torch",
    constants: bool = False,
) -> Report:
    """Check a policy loss against that of an algorithm, value and gradient.

    Parameters
    ----------
    loss : callable
        Called as ``loss(log_probs, old_log_probs, advantages, mask)`` with float64 arrays of shape
        (B, T) and a mask of bool, true on the tokens that count; returns one number, to be
        minimised. Other conventions are bridged by a lambda.
    algorithm : str or Algorithm
        Key of `ALGORITHMS`, or a row of your own. Its KL term is left out.
    library : {"torch", "numpy"}
        What arrays the loss takes. The gradient is PyTorch's, or that of finite differences.
    constants : bool
        Also pass the old log-probabilities and the advantages with their gradients attached, and
        ask that none flows (PyTorch alone).

    Returns
    -------
    Report
        What holds, what does not, and which known faults fit, alone or in pairs.

    Raises
    ------
    ValueError
        If the algorithm or the library is unknown.
    TypeError
        If `loss` cannot be called.
    """
    if not callable(loss):
        raise TypeError(f"loss must be a function, got {loss!r}")
    one_of(("torch", "numpy"), library=library)
    if not isinstance(algorithm, Algorithm):
        one_of(ALGORITHMS, algorithm=algorithm)
        algorithm = ALGORITHMS[algorithm]
    row = replace(algorithm, kl="none", kl_estimator=None, kl_weighted=False)
    require("algorithm", row.name, row.ratio != "product", "one with a ratio of tokens or none")
    title = f"policy loss against {row.name}'s, in {library}"
    tried = [e for e in _examples(row, library) if constants or not e.live]
    tolerance = 1e-6 if library == "torch" else 1e-5  # a loss may compute in float32

    found: dict[str, Outcome] = {}
    for example in tried:
        try:
            found[example.name] = evaluate(loss, example, library)
        except LossError as error:
            given = f"log_probs of shape {example.log_probs.shape}, mask {example.mask.tolist()}"
            note = f"on {example.name!r} {error} ({given})"
            return Report(title, tuple(found), (example.name,), notes=(note,))
    right = {e.name: evaluate(partial(_right, row), e, library) for e in tried}
    fits = partial(_all_close, found, tolerance=tolerance)
    if fits(right):
        return Report(title, tuple(found), ())
    factor = _factor(found, right)
    if factor is not None and fits({k: v.scaled(factor) for k, v in right.items()}):
        note = f"convention: {factor:.6g} times ours; the learning rate could do the same"
        return Report(title, tuple(found), (), notes=(note,))
    causes: list[tuple[Fault, ...]] = []
    conventions: list[tuple[Fault, ...]] = []
    for names, made in _outcomes(row, library):
        if fits(made):
            (conventions if all(f.convention for f in names) else causes).append(names)
    if conventions:
        notes = tuple(f"convention: {n[0].name}" for n in conventions)
        return Report(title, tuple(found), (), notes=notes)
    alone = [names for names in causes if len(names) == 1] or causes
    failed = [k for k in found if not found[k].close(right[k], tolerance)]
    return Report(
        title,
        tuple(k for k in found if k not in failed),
        tuple(failed),
        causes=tuple("; and ".join(fault.name for fault in names) for names in alone),
        notes=tuple(f"{f.name}: {f.effect}. One notices: {f.sign}." for n in alone for f in n)
        or _smallest(tried, found, right, failed),
    )


def _right(row: Algorithm, log_probs: Any, old: Any, advantages: Any, mask: Any) -> Any:
    batch = Batch(mask=mask, old_log_probs=old, advantages=advantages)
    length = LENGTH if row.aggregation == "fixed" else None
    return losses(row, batch, log_probs, length=length).loss


@cache
def _outcomes(row: Algorithm, library: str) -> list[tuple[tuple[Fault, ...], dict[str, Outcome]]]:
    """Evaluate every fault, and every pair, on all examples; once for a row."""
    tried = _examples(row, library)
    return [
        (names, {e.name: evaluate(changed, e, library) for e in tried})
        for names, changed in _changes(row)
    ]


def _examples(row: Algorithm, library: str) -> list[Example]:
    narrow = row.clip.clip_range / 0.2 if type(row.clip) is Clip else 1.0
    return [e for e in examples(narrow) if library == "torch" or not e.live]


def _changes(row: Algorithm) -> Iterator[tuple[tuple[Fault, ...], Parts]]:
    """Yield the row's loss with each fault alone, then with each pair that can go together."""
    single = {fault: change for fault in FAULTS if (change := dict(fault.change(row)))}
    whole = parts(row)
    for fault, change in single.items():
        yield (fault,), replace(whole, **change)
    for one, other in combinations(single, 2):
        if not single[one].keys() & single[other].keys():
            yield (one, other), replace(whole, **single[one], **single[other])


def _all_close(found: dict[str, Outcome], other: dict[str, Outcome], tolerance: float) -> bool:
    return all(found[name].close(other[name], tolerance) for name in found)


def _factor(found: dict[str, Outcome], right: dict[str, Outcome]) -> float | None:
    """Return what a loss is a multiple by, as its first value says; None if that is no number."""
    (one, *_), (other, *_) = found.values(), right.values()
    factor = one.value / other.value if other.value else np.nan
    return float(factor) if np.isfinite(factor) and factor > 0 else None


def _smallest(
    tried: list[Example],
    found: dict[str, Outcome],
    right: dict[str, Outcome],
    failed: list[str],
) -> tuple[str, ...]:
    """Describe the smallest batch on which two losses differ, token by token."""
    example = min((e for e in tried if e.name in failed), key=lambda e: int(e.mask.sum()))
    mine, ours = found[example.name], right[example.name]
    lines = [
        f"no known fault fits. The smallest batch that shows it, {example.name!r}:",
        f"your value {mine.value:.6g}, ours {ours.value:.6g}; of each token that counts",
        "log ratio  advantage  your gradient  ours",
    ]
    gap = example.log_probs - example.old_log_probs
    for place in zip(*np.nonzero(example.mask), strict=True):
        numbers = (
            gap[place],
            example.advantages[place],
            mine.gradient[place],
            ours.gradient[place],
        )
        lines.append("  ".join(f"{number:9.4f}" for number in numbers))
    return tuple(lines)
