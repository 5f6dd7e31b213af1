"""The policy loss: what it is tried on, its parts, and what goes wrong with each."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np

from ppo_demo._arrays import as_mask, keep, log_ratio, namespace, safe_exp, stop_gradient
from ppo_demo.advantages import whiten
from ppo_demo.aggregation import aggregate, masked_mean
from ppo_demo.check.engine import Example, Fault, Subject
from ppo_demo.losses import Algorithm, Batch, losses
from ppo_demo.surrogates import RATIOS, CappedWeight, Clip, DualClip, GammaWeight, SoftGate

LENGTH = 6
"""Limit on a completion, for a mean over one fixed length."""


def _examples(row: Algorithm) -> tuple[Example, ...]:
    """Return the batches to try; log-ratios lie where the row's clip range is."""
    chance = np.random.default_rng(11)
    narrow = row.clip.clip_range / 0.2 if type(row.clip) is Clip else 1.0
    whole = np.ones((3, 4), dtype=bool)
    ragged = np.arange(5) < np.array([[5], [2], [3]])

    def make(name: str, mask: Any, low: float, high: float, sign: int = 0, **more: Any) -> Example:
        shape = mask.shape
        old = -chance.uniform(0.5, 2.0, shape)
        advantages = np.repeat(chance.uniform(0.4, 1.6, (shape[0], 1)), shape[1], 1)
        advantages *= sign or np.resize([1, -1], (shape[0], 1))
        given = {
            "log_probs": old + narrow * chance.uniform(low, high, shape),
            "old_log_probs": old,
            "advantages": advantages,
            "mask": mask,
        }
        return Example(name, given, by="log_probs", **more)

    dirty = make("garbage on padding", ragged, -0.6, 0.6)
    garbage = np.where(ragged, 0, np.nan)
    spoilt = {k: v if k == "mask" else v + garbage for k, v in dirty.given.items()}
    # e^11.5 is beyond float16; the product of four ratios has that from the four.
    far = {"token": 11.5, "sequence": 11.5}.get(row.ratio, 2.9)
    old = np.full((2, 4), -14.0)
    half = {
        "log_probs": old + np.array([[far], [0.01]]),
        "old_log_probs": old,
        "advantages": np.full((2, 4), -0.3),
        "mask": np.ones((2, 4), dtype=bool),
    }
    return (
        make("first update", whole, 0, 0),
        make("one token", np.ones((1, 1), dtype=bool), 0.05, 0.1, 1),
        make("within the clip range", whole, -0.15, 0.15),
        make("beyond it above, good", whole, 0.3, 0.9, 1),
        make("beyond it below, good", whole, -0.9, -0.35, 1),
        make("beyond it above, bad", whole, 0.3, 0.9, -1),
        make("beyond it below, bad", whole, -0.9, -0.35, -1),
        make("far beyond it above, bad", whole, 1.2, 1.5, -1),
        make("completions of several lengths", ragged, -0.6, 0.6),
        make("the old policy given as the same tensor", ragged, 0, 0, live="old_log_probs"),
        make("advantages with a gradient", ragged, -0.6, 0.6, live="advantages"),
        replace(dirty, given=spoilt),
        Example("half precision, a ratio of 98,716", half, half=True),
    )


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
    moving, constant : callable
        What is made of the log-probabilities, and of the old ones.
    fixed : callable
        What is made of the advantages; takes the mask too.
    factor : float
        What the mean is multiplied by: −1, since an objective is maximised.
    """

    ratio: Callable[..., Any]
    objective: Callable[..., Any]
    mean: Callable[..., Any]
    mask: Callable[..., Any] = lambda mask: mask
    guard: Callable[..., Any] = keep
    moving: Callable[..., Any] = lambda logs: logs
    constant: Callable[..., Any] = stop_gradient
    fixed: Callable[..., Any] = lambda advantages, _: stop_gradient(advantages)
    factor: float = -1.0

    def __call__(self, log_probs: Any, old: Any, advantages: Any, mask: Any) -> Any:
        """Return the loss."""
        mask = self.mask(as_mask(mask, log_probs.shape))
        advantages = self.fixed(advantages, mask)
        given = self.moving(log_probs), self.constant(old), advantages
        logs, old, advantages = (self.guard(x, mask) for x in given)
        objective = self.objective(self.ratio(logs, old, mask), advantages, logs)
        # Rules take advantages for constants; all are proportional to their size.
        xp, none = namespace(logs), advantages == 0
        objective = objective * xp.where(
            none, 1, advantages / stop_gradient(xp.where(none, 1, advantages))
        )
        return self.factor * self.mean(objective + namespace(logs).zeros_like(logs), mask)


def parts(row: Algorithm) -> Parts:
    """Return the policy loss of a row in parts; put together they are `losses`."""
    return Parts(ratio=_live(row.ratio), objective=row.clip, mean=_mean(row))


def _mean(row: Algorithm) -> Callable[..., Any]:
    length = LENGTH if row.aggregation == "fixed" else None
    return partial(aggregate, how=row.aggregation, length=length)


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


Change = Callable[[Algorithm], Mapping[str, Any]]


def _plain(logs: Any, old: Any, _: Any) -> Any:
    return namespace(logs).exp(logs - old)


def _where(rule: Callable[[Algorithm], bool], **change: Any) -> Change:
    return lambda row: change if rule(row) else {}


def _on(*kinds: type) -> Callable[[Callable[[Any], Callable[..., Any]]], Change]:
    """Change the objective of rows with these clip rules."""
    return lambda make: lambda row: {"objective": make(row.clip)} if type(row.clip) in kinds else {}


def _ratio(make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Change:
    """Change the ratio of rows that have one."""
    return lambda row: {"ratio": make(_live(row.ratio))} if row.ratio != "none" else {}


def _token_mean(row: Algorithm) -> bool:
    return row.aggregation == "token"


def _bounded(rule: Any, ratio: Any) -> Any:
    return namespace(ratio).clip(ratio, 1 - rule.clip_range, 1 + rule.high)


def _log_clipped(rule: Any, ratio: Any, advantages: Any, _: Any) -> Any:
    xp = namespace(ratio)
    held = xp.exp(xp.clip(xp.log(ratio), -rule.clip_range, rule.high))
    return xp.minimum(ratio * advantages, held * advantages)


def _without_last(mask: Any) -> Any:
    xp = namespace(mask)
    after = xp.concat([mask[:, 1:], xp.zeros_like(mask[:, :1])], axis=1)
    alone = xp.sum(xp.astype(mask, xp.int64), axis=1, keepdims=True) == 1
    return mask & (after | alone)


def _times_mask(objective: Any, mask: Any) -> Any:
    xp = namespace(objective)
    real = xp.astype(mask, objective.dtype)
    return xp.sum(objective * real) / xp.sum(real)


def _coarse(ratio: Callable[..., Any]) -> Callable[..., Any]:
    def overflown(*given: Any) -> Any:
        found = ratio(*given)
        xp = namespace(found)
        # Checks pass what was float16 as float32, and all else as float64.
        half = found.dtype == xp.float32
        return xp.astype(xp.astype(found, xp.float16), xp.float32) if half else found

    return overflown


def _weight(rule: Any, ratio: Any) -> Any:
    """Return the weight of a rule that multiplies log π, with its gradient."""
    xp = namespace(ratio)
    return xp.clip(ratio, None, rule.cap)


FAULTS = (
    Fault(
        "the mean runs over padding too",
        "what stands on padding is learned from, and real tokens count for less",
        "the loss changes when a batch is padded further",
        _where(_token_mean, guard=lambda x, _: x, mean=lambda x, _: namespace(x).mean(x)),
    ),
    Fault(
        "the sum over real tokens is divided by all places, padding too",
        "short completions make the steps smaller",
        "the loss changes when a batch is padded further",
        _where(_token_mean, mean=lambda x, mask: namespace(x).mean(keep(x, mask))),
    ),
    Fault(
        "padding is multiplied by 0, not left out",
        "one NaN or infinity on padding spoils the whole batch",
        "NaN losses that come with longer padding",
        _where(_token_mean, guard=lambda x, _: x, mean=_times_mask),
    ),
    Fault(
        "padding is left out of the mean, but not of what it is a mean of",
        "NaN or infinity on padding makes the gradient NaN, though the loss looks right",
        "a NaN gradient norm beside a finite loss",
        lambda row: (
            {"guard": lambda x, _: x, **({"ratio": _plain} if row.ratio == "token" else {})}
            if row.ratio in ("none", "token")
            else {}
        ),
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
        _on(Clip)(lambda rule: lambda r, a, _: namespace(r).maximum(r * a, _bounded(rule, r) * a)),
    ),
    Fault(
        "the ratio is clipped without the minimum",
        "a token that went the wrong way and left the range is never brought back",
        "bad tokens that stay likely",
        _on(Clip)(lambda rule: lambda r, a, _: _bounded(rule, r) * a),
    ),
    Fault(
        "the minimum is taken before the advantage is multiplied in",
        "with a negative advantage the wrong side is clipped",
        "bad tokens beyond the upper bound get no push down",
        _on(Clip)(lambda rule: lambda r, a, _: namespace(r).minimum(r, _bounded(rule, r)) * a),
    ),
    Fault(
        "the product of ratio and advantage is clipped, not the ratio",
        "advantages themselves are held to about 1",
        "the loss on the first batch is not the mean advantage",
        _on(Clip)(lambda rule: lambda r, a, _: namespace(r).minimum(r * a, _bounded(rule, r * a))),
    ),
    Fault(
        "only the upper bound is clipped",
        "bad tokens are pushed down without a bound",
        "the KL rises on batches of bad completions",
        _on(Clip)(
            lambda rule: (
                lambda r, a, _: namespace(r).minimum(
                    r * a, namespace(r).clip(r, None, 1 + rule.high) * a
                )
            )
        ),
    ),
    Fault(
        "the range is applied to the logarithm of the ratio",
        "the bounds are e^±ε, not 1 ± ε: a little wider above, tighter below",
        "nothing to see by eye: the clip fraction differs slightly",
        lambda row: (
            {"objective": partial(_log_clipped, row.clip)}
            if type(row.clip) is Clip and row.clip.clip_range > 0.05  # below, one cannot tell
            else {}
        ),
    ),
    Fault(
        "the lower clip range is used on both sides",
        "unlikely tokens that did well are held as tightly as others",
        "the clip fraction above and below are alike",
        lambda row: (
            {"objective": Clip(row.clip.clip_range)}
            if type(row.clip) is Clip and row.clip.high != row.clip.clip_range
            else {}
        ),
    ),
    Fault(
        "nothing is clipped",
        "steps after the first on a batch may go anywhere",
        "the approximate KL of a batch has no bound",
        _on(Clip)(lambda _: lambda r, a, __: r * a),
    ),
    Fault(
        "the weight is not capped",
        "one rare token can outweigh the batch",
        "spikes of the gradient norm",
        _on(CappedWeight)(lambda _: lambda r, a, logs: stop_gradient(r) * a * logs),
    ),
    Fault(
        "the capped ratio itself is the objective",
        "tokens beyond the cap have no gradient, which the rule is there to keep",
        "the first loss is the mean advantage, not that times log π",
        _on(CappedWeight)(lambda rule: lambda r, a, _: _weight(rule, r) * a),
    ),
    Fault(
        "the weight is not a constant",
        "a second gradient flows through the ratio, and can turn the push around",
        "the gradient differs when the weight is detached",
        _on(CappedWeight)(lambda rule: lambda r, a, logs: _weight(rule, r) * a * logs),
    ),
    Fault(
        "good and bad tokens have the same softness",
        "bad tokens that became likelier are pushed longer than the rule says",
        "nothing to see by eye",
        _on(SoftGate)(lambda rule: replace(rule, temperature_negative=rule.temperature_positive)),
    ),
    Fault(
        "good and bad completions have the same shape of weight",
        "bad completions that became likelier count for more than the rule says",
        "nothing to see by eye",
        _on(GammaWeight)(lambda rule: replace(rule, shape_negative=rule.shape_positive)),
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
        _ratio(lambda ratio: lambda logs, _, mask: ratio(logs, stop_gradient(logs), mask)),
    ),
    Fault(
        "the log-probabilities are constants",
        "nothing is learned",
        "a gradient of exactly 0 on every batch",
        lambda _: {"moving": stop_gradient},
    ),
    Fault(
        "the advantages are not constants",
        "the policy is also pushed to change what it is judged by",
        "the gradient differs when advantages are detached",
        lambda _: {"fixed": lambda advantages, _: advantages},
    ),
    Fault(
        "the advantages are whitened once more",
        "groups and batches that were weighted on purpose lose their weights",
        "the loss on the first batch is 0 whatever the advantages",
        lambda _: {"fixed": lambda advantages, mask: whiten(stop_gradient(advantages), mask)},
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
        _ratio(lambda ratio: lambda *given: 1 / ratio(*given)),
    ),
    Fault(
        "the ratio overflows in half precision",
        "one ratio above 65,504 makes the loss infinite",
        "an infinite or NaN loss, and none of it in float32",
        lambda row: {"ratio": _coarse(_live(row.ratio))} if type(row.clip) is Clip else {},
    ),
    Fault(
        "the ratio of a completion is the product of its tokens', not their mean",
        "the clip acts on nearly every long completion",
        "a clip fraction near 1",
        _where(lambda row: row.ratio == "sequence", ratio=_live("product")),
    ),
    Fault(
        "each token has a ratio of its own where a completion has one",
        "single tokens are clipped, with a range made for whole completions",
        "a clip fraction far above the algorithm's",
        _where(lambda row: row.ratio in ("sequence", "product"), ratio=_live("token")),
    ),
    Fault(
        "all tokens of a completion share one ratio where each has its own",
        "one token that ran away is hidden by its neighbours",
        "a clip fraction of 0 or 1 for each completion",
        _where(lambda row: row.ratio == "token", ratio=_live("sequence")),
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
        _where(_token_mean, mean=partial(aggregate, how="sequence")),
    ),
    Fault(
        "the sum of each completion's tokens is taken, not their mean",
        "long completions count for more",
        "a gradient norm that grows with the length",
        _where(
            lambda row: row.aggregation in ("token", "sequence"), mean=partial(aggregate, how="sum")
        ),
    ),
    Fault(
        "the sum over the tokens, not their mean",
        "the learning rate depends on how many tokens a batch has",
        "a gradient norm that grows with the batch",
        _where(_token_mean, mean=lambda x, mask: namespace(x).sum(keep(x, mask))),
        convention=True,
    ),
    Fault(
        "the sum over the completions, not their mean",
        "the learning rate depends on how many completions a batch has",
        "a gradient norm that grows with the batch",
        lambda row: (
            {} if _token_mean(row) else {"mean": lambda x, mask: x.shape[0] * _mean(row)(x, mask)}
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


def _right(row: Algorithm, log_probs: Any, old: Any, advantages: Any, mask: Any) -> Any:
    batch = Batch(mask=mask, old_log_probs=old, advantages=advantages)
    length = LENGTH if row.aggregation == "fixed" else None
    return losses(row, batch, log_probs, length=length).loss


@cache
def subject(row: Algorithm) -> Subject:
    """Return what a policy loss is checked for; `row` has no KL term."""
    return Subject(
        title=f"policy loss against {row.name}'s",
        right=partial(_right, row),
        build=partial(replace, parts(row)),
        faults=FAULTS,
        asked=row,
        examples=_examples(row),
    )
