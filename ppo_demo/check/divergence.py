"""KL terms, as values and as losses: what they are tried on, and what goes wrong."""

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, Literal

import numpy as np

from ppo_demo._arrays import log_softmax, namespace, stop_gradient
from ppo_demo.check.engine import Example, Fault, Subject
from ppo_demo.divergences import categorical_kl, k3, kl_estimate

Kind = Literal["k1", "k2", "k3", "exact"]
Use = Literal["value", "loss"]
Asked = tuple[Kind, Use]


def _pairs(chance: np.random.Generator, size: tuple[int, ...]) -> dict[str, Any]:
    return {"logits": chance.normal(size=size), "ref_logits": chance.normal(size=size)}


def _examples(kind: Kind, use: Use) -> tuple[Example, ...]:
    chance = np.random.default_rng(13)
    if kind == "exact" or use == "loss":
        shape = () if use == "loss" else (2, 4)
        by = "logits" if use == "loss" else ""
        shapes = {"two actions": (1, 1, 2), "a batch": (2, 4, 6)}
        found = [
            Example(name, _pairs(chance, size), shape and size[:2], by=by)
            for name, size in shapes.items()
        ]
        same = chance.normal(size=(2, 4, 3))
        found.insert(0, Example("equal policies", {"logits": same, "ref_logits": same}, shape, by))
        if kind == "exact":
            never = _pairs(chance, (2, 4, 3))
            never["logits"][0, 0, 1] = -np.inf
            found.append(Example("an action that the policy never takes", never, shape))
        return tuple(found)
    old = -chance.uniform(0.5, 2, (2, 4))

    def make(name: str, gap: Any, **more: Any) -> Example:
        return Example(name, {"log_probs": old + gap, "ref_log_probs": old}, old.shape, **more)

    return (
        make("equal policies", 0.0),
        make("a token that the policy likes better", 0.4),
        make("a token that the reference likes better", -0.7),
        make("a batch", chance.normal(size=old.shape)),
        make("half precision, a log-ratio of −11.5", -11.5, half=True),
    )


def _coarse(log_probs: Any, ref_log_probs: Any) -> Any:
    xp, d = namespace(log_probs), log_probs - ref_log_probs
    if d.dtype != xp.float32:  # checks pass what was float16 as float32
        return k3(d)
    return xp.astype(xp.astype(xp.exp(-d), xp.float16), xp.float32) - 1 + d


def _of_logits(logits: Any, ref_logits: Any) -> Any:
    xp = namespace(logits)
    return xp.sum(xp.exp(log_softmax(logits)) * (logits - ref_logits), axis=-1)


# PyTorch's ``kl_div(input, target)`` is the sum of target · (log target − input).
def _of_probabilities(logits: Any, ref_logits: Any) -> Any:
    xp, p = namespace(logits), log_softmax(logits)
    return xp.sum(xp.exp(p) * (p - xp.exp(log_softmax(ref_logits))), axis=-1)


def _of_logarithms(logits: Any, ref_logits: Any) -> Any:
    xp, p = namespace(logits), log_softmax(logits)
    return xp.sum(p * (xp.log(p) - log_softmax(ref_logits)), axis=-1)


Estimate = Callable[[Any, Any], Any]
_VALUES: tuple[Asked, ...] = (("k1", "value"), ("k2", "value"), ("k3", "value"))
_LOSSES: tuple[Asked, ...] = (("k1", "loss"), ("k2", "loss"), ("k3", "loss"))


def _by(estimate: Estimate, *where: Asked) -> Callable[[Asked], Mapping[str, Any]]:
    """Take this estimate, where that is a fault."""
    return lambda asked: {"estimate": estimate} if asked in where else {}


FAULTS = (
    Fault(
        "the sign is turned round: reference less policy",
        "the KL term pays for moving away from the reference",
        "a KL that is mostly negative",
        _by(lambda lp, ref: ref - lp, ("k1", "value")),
    ),
    Fault(
        "the arguments are exchanged",
        "the mean is no KL at all: χ² less the KL",
        "tokens that the policy likes better cost more than they should",
        _by(lambda lp, ref: k3(ref - lp), ("k3", "value")),
    ),
    Fault(
        "it is k1",
        "single tokens count below 0",
        "a KL below 0 on single tokens",
        _by(lambda lp, ref: lp - ref, *_VALUES[1:]),
    ),
    Fault(
        "it is k2",
        "the mean is biased where policies are far apart",
        "nothing to see where they are close",
        _by(lambda lp, ref: 0.5 * (lp - ref) ** 2, ("k1", "value"), ("k3", "value")),
    ),
    Fault(
        "it is k3",
        "in a reward its gradient is another one; as a value the mean is the same",
        "a KL that is never below 0",
        _by(lambda lp, ref: k3(lp - ref), *_VALUES[:2]),
    ),
    Fault(
        "the absolute value of the log-ratio is taken",
        "noise adds up, where it should cancel",
        "a KL above 0 for two policies that differ by rounding alone",
        _by(lambda lp, ref: abs(lp - ref), *_VALUES),
    ),
    Fault(
        "the difference of probabilities is taken, not of their logarithms",
        "the penalty on rare tokens vanishes",
        "a KL near 0 whatever the policy does",
        _by(lambda lp, ref: namespace(lp).exp(lp) - namespace(lp).exp(ref), *_VALUES),
    ),
    Fault(
        "the 1 is not subtracted",
        "as a value it is too large by 1 a token",
        "the KL of the first batch is 1 on every token",
        _by(lambda lp, ref: k3(lp - ref) + 1, ("k3", "value")),
    ),
    Fault(
        "the exponential overflows in half precision",
        "one token makes the KL infinite",
        "an infinite or NaN loss, and none of it in float32",
        _by(_coarse, ("k3", "value")),
    ),
    Fault(
        "the other KL is taken: from the reference to the policy",
        "the policy is made to cover all that the reference does, not to stay within it",
        "nothing to see where they are close",
        _by(lambda p, q: categorical_kl(q, p), ("exact", "value"), ("exact", "loss")),
    ),
    Fault(
        "`kl_div` is given probabilities where it wants their logarithms",
        "the result is no KL, and has another gradient",
        "a KL that is not 0 for equal policies",
        _by(_of_probabilities, ("exact", "value")),
    ),
    Fault(
        "`kl_div` is given logarithms without `log_target=True`",
        "the result is NaN",
        "a KL of NaN",
        _by(_of_logarithms, ("exact", "value")),
    ),
    Fault(
        "the mean over the vocabulary is taken, not the sum",
        "the penalty is too weak by the size of the vocabulary",
        "a KL far below the one of sampled tokens",
        _by(lambda p, q: categorical_kl(p, q) / p.shape[-1], ("exact", "value")),
    ),
    Fault(
        "logits are compared, not log-probabilities",
        "a constant added to all logits changes the KL",
        "a KL below 0",
        _by(_of_logits, ("exact", "value")),
    ),
    Fault(
        "it is k1, whose gradient is 0 on average",
        "the term only adds noise",
        "a larger β changes nothing, or the KL grows with it",
        _by(lambda lp, ref: lp - ref, *_LOSSES),
    ),
    Fault(
        "it is k3, whose gradient is that of the KL from the reference to the policy",
        "the policy is made to cover all that the reference does; GRPO does it by design",
        "nothing to see where they are close",
        _by(lambda lp, ref: k3(lp - ref), *_LOSSES),
        convention=True,
    ),
    Fault(
        "the arguments are exchanged: the gradient is that of half the χ²",
        "tokens that the policy likes better are pulled back too hard",
        "a KL that falls faster than β says",
        _by(lambda lp, ref: k3(ref - lp), *_LOSSES),
    ),
    Fault(
        "the log-probabilities are constants",
        "the term changes nothing",
        "a larger β changes nothing",
        _by(lambda lp, ref: stop_gradient(lp - ref), ("exact", "loss")),
    ),
    Fault(
        "the sign is turned round",
        "the KL term pays for moving away from the reference",
        "the KL grows with β",
        lambda asked: {"factor": -1.0} if asked[1] == "loss" else {},
    ),
)
"""What is known to go wrong in KL terms, and what is chosen on purpose."""


def _expected(estimate: Estimate, exact: bool, factor: float = 1.0) -> Estimate:
    """Return an estimate's mean over tokens that the policy samples, for its gradient alone."""

    def loss(logits: Any, ref_logits: Any) -> Any:
        xp = namespace(logits)
        if exact:
            found = xp.sum(estimate(logits, ref_logits))
        else:
            log_probs = log_softmax(logits)
            weights = stop_gradient(xp.exp(log_probs))
            found = xp.sum(weights * estimate(log_probs, log_softmax(ref_logits)))
        # The value of an estimate is another check.
        return factor * (found - stop_gradient(found))

    return loss


def as_loss(estimate: Estimate, kind: Kind) -> Estimate:
    """Return what is descended if an estimate stands in a loss."""
    return _expected(estimate, kind == "exact")


@cache
def subject(kind: Kind, use: Use) -> Subject:
    """Return what a KL term is checked for."""
    exact = kind == "exact"

    def loss(estimate: Estimate | None = None, factor: float = 1.0) -> Any:
        right = categorical_kl if exact else partial(kl_estimate, estimator="k2")
        return _expected(estimate or right, exact, factor)

    def value(estimate: Estimate) -> Any:
        return estimate

    said = "its gradient as a loss" if use == "loss" else "its value"
    sampled: Any = kind
    right: Any = categorical_kl if exact else partial(kl_estimate, estimator=sampled)
    return Subject(
        title=f"KL {'over all tokens' if exact else f'by {kind}'}, {said}",
        right=_expected(categorical_kl, True) if use == "loss" else right,
        build=loss if use == "loss" else value,
        faults=FAULTS,
        asked=(kind, use),
        examples=_examples(kind, use),
    )
