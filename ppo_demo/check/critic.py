"""The value loss: what it is tried on, its parts, and what goes wrong with each."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np

from ppo_demo._arrays import as_mask, keep, namespace, stop_gradient
from ppo_demo.aggregation import aggregate, masked_mean
from ppo_demo.check.engine import Example, Fault, Subject
from ppo_demo.surrogates import value_loss


@dataclass(frozen=True)
class Parts:
    """A value loss, taken apart so that faults can be put into it.

    Attributes
    ----------
    clip_range : float or None
        How far a prediction may move; None does not clip.
    worse : callable
        What is made of the error and of the one of the held prediction.
    around : callable
        What a prediction is held near; takes old values and returns.
    error : callable
        What is made of predictions and returns.
    mean, guard : callable
        As in a policy loss.
    target : callable
        What is made of the returns.
    factor : float
        What the mean is multiplied by.
    """

    clip_range: float | None
    worse: Callable[..., Any] = lambda error, held: namespace(error).maximum(error, held)
    around: Callable[..., Any] = lambda old, _: old
    error: Callable[..., Any] = lambda values, returns: (values - returns) ** 2
    mean: Callable[..., Any] = masked_mean
    guard: Callable[..., Any] = keep
    target: Callable[..., Any] = stop_gradient
    factor: float = 0.5

    def __call__(self, values: Any, old_values: Any, returns: Any, mask: Any) -> Any:
        """Return the loss."""
        xp, mask = namespace(values), as_mask(mask, values.shape)
        given = values, stop_gradient(old_values), self.target(returns)
        values, old, returns = (self.guard(x, mask) for x in given)
        error = self.error(values, returns)
        if self.clip_range is not None:
            centre = self.around(old, returns)
            held = centre + xp.clip(values - centre, -self.clip_range, self.clip_range)
            error = self.worse(error, self.error(held, returns))
        return self.factor * self.mean(error, mask)


def _examples(clip_range: float | None) -> tuple[Example, ...]:
    chance = np.random.default_rng(7)
    reach = clip_range or 0.2
    whole = np.ones((3, 4), dtype=bool)
    ragged = np.arange(5) < np.array([[5], [2], [3]])

    def make(name: str, mask: Any, moved: float, short: float, **more: Any) -> Example:
        old = chance.uniform(-1, 1, mask.shape)
        side = np.where(chance.random(mask.shape) < 0.5, -1, 1)
        given = {
            "values": old + side * moved * reach * chance.uniform(0.5, 1, mask.shape),
            "old_values": old,
            "returns": old + side * short * chance.uniform(0.5, 1, mask.shape),
            "mask": mask,
        }
        return Example(name, given, by="values", **more)

    spoilt = make("garbage on padding", ragged, 2.5, 1)
    garbage = np.where(ragged, 0, np.nan)
    dirty = {k: v if k == "mask" else v + garbage for k, v in spoilt.given.items()}
    far = {
        "values": np.full((1, 4), 300.0),
        "old_values": np.full((1, 4), 299.0),
        "returns": np.full((1, 4), -20.0),
        "mask": np.ones((1, 4), dtype=bool),
    }
    return (
        make("one token", np.ones((1, 1), dtype=bool), 0, 1),
        make("predictions that have not moved", whole, 0, 1),
        make("within the clip range", whole, 0.9, 1),
        make("moved beyond it, towards the return", whole, 2.5, 3),
        make("moved beyond it, away from the return", whole, 2.5, -1),
        make("moved beyond it and past the return", whole, 5, 0.1),
        make("completions of several lengths", ragged, 2.5, 1),
        replace(spoilt, given=dirty),
        make("returns with a gradient", ragged, 2.5, 1, live="returns"),
        Example("half precision, an error of 320", far, half=True),
    )


def _coarse(values: Any, returns: Any) -> Any:
    xp, found = namespace(values), (values - returns) ** 2
    # Checks pass what was float16 as float32, and all else as float64.
    half = found.dtype == xp.float32
    return xp.astype(xp.astype(found, xp.float16), xp.float32) if half else found


def _clipped(**change: Any) -> Callable[[float | None], Mapping[str, Any]]:
    return lambda clip_range: change if clip_range is not None else {}


FAULTS = (
    Fault(
        "the smaller error is taken where the larger belongs",
        "a prediction that moved away from its return is not called back",
        "explained variance that stays low",
        _clipped(worse=lambda error, held: namespace(error).minimum(error, held)),
    ),
    Fault(
        "the error of the held prediction is taken, without the maximum",
        "a prediction that left the range the wrong way has no gradient",
        "explained variance that stays low",
        _clipped(worse=lambda _, held: held),
    ),
    Fault(
        "errors are clipped: predictions are held near the returns, not near the old values",
        "large errors, which need it most, have no gradient",
        "a value loss that stays below half the clip range's square",
        _clipped(around=lambda _, returns: returns, worse=lambda _, held: held),
    ),
    Fault(
        "nothing is clipped",
        "none that is known to hurt: the clip is a detail of implementations",
        "the value loss differs from the second step on a batch on",
        _clipped(clip_range=None),
    ),
    Fault(
        "the returns are not constants",
        "the target runs after the prediction, or away from it",
        "a gradient of exactly 0, or one that differs when returns are detached",
        lambda _: {"target": lambda returns: returns},
    ),
    Fault(
        "the error is not squared",
        "the median is learned, not the mean",
        "values that ignore rare large rewards",
        lambda _: {"error": lambda values, returns: abs(values - returns)},
    ),
    Fault(
        "the sign is turned round",
        "values run away from the returns",
        "explained variance far below 0",
        lambda _: {"factor": -0.5},
    ),
    Fault(
        "the mean runs over padding too",
        "values of padding are learned, and real tokens count for less",
        "the loss changes when a batch is padded further",
        lambda _: {"guard": lambda x, _: x, "mean": lambda x, _: namespace(x).mean(x)},
    ),
    Fault(
        "the sum over real tokens is divided by all places, padding too",
        "short completions make the steps smaller",
        "the loss changes when a batch is padded further",
        lambda _: {"mean": lambda x, mask: namespace(x).mean(keep(x, mask))},
    ),
    Fault(
        "padding is multiplied by 0, not left out",
        "one NaN or infinity on padding spoils the whole batch",
        "NaN losses that come with longer padding",
        lambda _: {
            "guard": lambda x, _: x,
            "mean": lambda x, mask: namespace(x).sum(x * mask) / namespace(x).sum(mask),
        },
    ),
    Fault(
        "the square overflows in half precision",
        "an error above 255 makes the loss infinite",
        "an infinite or NaN loss, and none of it in float32",
        lambda _: {"error": _coarse},
    ),
    Fault(
        "each completion has a mean of its own where it is over all tokens",
        "tokens of long completions count for less",
        "the loss changes when a batch is cut into completions differently",
        lambda _: {"mean": partial(aggregate, how="sequence")},
        convention=True,
    ),
    Fault(
        "the sum over the tokens, not their mean",
        "the learning rate depends on how many tokens a batch has",
        "a gradient norm that grows with the batch",
        lambda _: {"mean": lambda x, mask: namespace(x).sum(keep(x, mask))},
        convention=True,
    ),
)
"""What is known to go wrong in value losses, and conventions that are no faults."""


def _right(clip_range: float | None, values: Any, old_values: Any, returns: Any, mask: Any) -> Any:
    old = None if clip_range is None else old_values
    return masked_mean(value_loss(values, returns, old, clip_range, mask), mask)


@cache
def subject(clip_range: float | None) -> Subject:
    """Return what a value loss is checked for."""
    held = f"clipped at {clip_range:g}" if clip_range is not None else "not clipped"
    return Subject(
        title=f"value loss, {held}",
        right=partial(_right, clip_range),
        build=partial(replace, Parts(clip_range)),
        faults=FAULTS,
        asked=clip_range,
        examples=_examples(clip_range),
    )
