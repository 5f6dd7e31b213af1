"""One loss for every algorithm of the field: what the trainer descends, and the book prints.

An `Algorithm` is data: which advantage, which ratio, which clip rule, which mean, and where the
KL term stands. `losses` computes what any of them minimises on a `Batch`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, get_args

from ppo_demo._arrays import (
    A,
    Array,
    as_mask,
    at_least_float32,
    keep,
    namespace,
    require_floats,
    require_per_token,
    require_shape,
    stop_gradient,
    widen,
)
from ppo_demo._checks import require, weights
from ppo_demo.advantages import group_relative, leave_one_out
from ppo_demo.aggregation import Aggregation, aggregate, masked_mean
from ppo_demo.divergences import Estimator, kl_estimate
from ppo_demo.surrogates import RATIOS, ClipRule, importance_weight, value_loss

Advantage: TypeAlias = Literal[
    "gae", "batch_mean", "leave_one_out", "group_mean", "group_std", "mean_relative"
]
Ratio: TypeAlias = Literal["none", "token", "sequence", "product"]
KLPlace: TypeAlias = Literal["none", "reward", "loss"]


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """One variant of the policy-gradient step.

    Attributes
    ----------
    name, paper : str
        What it is called, and the key of its source in the book's bibliography.
    advantage : str
        ``"gae"`` (needs a value head), or a function of the rewards of a prompt's completions:
        ``"batch_mean"`` (less the mean of the batch), ``"leave_one_out"``, ``"group_mean"``,
        ``"group_std"``, ``"mean_relative"``; see `ppo_demo.advantages`.
    ratio : {"none", "token", "sequence", "product"}
        Importance ratio: none (the gradient of log π), per token, or per completion, as the
        geometric mean or the product of its tokens' ratios.
    clip : ClipRule
        A clip rule of `ppo_demo.surrogates`, with its numbers.
    aggregation : {"token", "sequence", "fixed", "sum"}
        How per-token losses become one; see `aggregate`.
    kl : {"none", "reward", "loss"}
        Where the KL term stands. In the reward it changes the advantages, so it is the caller's.
    kl_estimator : {"k1", "k2", "k3", "exact"}, optional
        For a KL term in the loss, and needed there; ``"exact"`` is `categorical_kl`.
    kl_weighted : bool
        Multiply the estimate by the ratio, so that its gradient is the reverse KL's.

    Raises
    ------
    ValueError
        If a field has a value that is unknown, or fields contradict each other.
    """

    name: str
    paper: str
    advantage: Advantage
    ratio: Ratio
    clip: ClipRule
    aggregation: Aggregation
    kl: KLPlace = "none"
    kl_estimator: Estimator | Literal["exact"] | None = None
    kl_weighted: bool = False

    def __post_init__(self) -> None:
        def check(field: str, valid: bool, allowed: str) -> None:
            require(f"{field} of algorithm {self.name!r}", getattr(self, field), valid, allowed)

        for field, kind in (
            ("advantage", Advantage),
            ("ratio", Ratio),
            ("aggregation", Aggregation),
            ("kl", KLPlace),
        ):
            check(field, getattr(self, field) in get_args(kind), f"one of {get_args(kind)}")
        check("clip", isinstance(self.clip, ClipRule), "a clip rule, such as Clip(0.2)")
        on = self.clip.ratios
        check("ratio", self.ratio in on, f"one of {on} for {type(self.clip).__name__} to act on")
        if self.kl != "loss":
            check("kl_estimator", self.kl_estimator is None, "left out unless kl='loss'")
            check("kl_weighted", not self.kl_weighted, "left out unless kl='loss'")
            return
        known = (*get_args(Estimator), "exact")
        check("kl_estimator", self.kl_estimator in known, f"one of {known} for kl='loss'")
        check(
            "kl_estimator",
            self.kl_estimator != "k1" or self.kl_weighted,
            "'k2', 'k3' or weighted by the ratio: as a loss, k1 has no gradient in expectation",
        )
        weighable = self.ratio != "none" and self.kl_estimator != "exact"
        check(
            "kl_weighted",
            weighable or not self.kl_weighted,
            "left out for ratio='none', and for an exact KL",
        )


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Completions as they were sampled, B of them; all arrays but `tokens` are about the *next*.

    All of it is constant for the gradient of a loss.

    Attributes
    ----------
    mask : array of bool or 0/1, shape (B, T)
        True at t where token t + 1 belongs to the completion. What the others hold elsewhere,
        NaN and infinities included, reaches neither a loss nor its gradient.
    old_log_probs : array, shape (B, T)
        Of token t + 1 under the policy that sampled it.
    advantages : array, shape (B, T) or (B, 1)
        Of token t + 1, or one per completion.
    tokens : array of int, shape (B, T + 1), optional
        Prompt, completion, padding; what a model reads.
    returns, old_values : array, shape (B, T), optional
        What the value head should predict, and what it predicted when the batch was sampled.
    ref_log_probs : array, shape (B, T), optional
        Of token t + 1 under the reference.
    ref_logits : array, shape (B, T, V), optional
        Of the reference, for an exact KL.
    sampler_log_probs : array, shape (B, T), optional
        As the sampler reported them, where it is not quite the old policy.
    """

    mask: Any
    old_log_probs: Any
    advantages: Any
    tokens: Any = None
    returns: Any = None
    old_values: Any = None
    ref_log_probs: Any = None
    ref_logits: Any = None
    sampler_log_probs: Any = None

    def rows(self, index: Any) -> "Batch":
        """Return some of the completions."""
        found = {name: value for name, value in vars(self).items() if value is not None}
        return Batch(**{name: value[index] for name, value in found.items()})


@dataclass(frozen=True)
class Losses:
    """What `losses` returns.

    Attributes
    ----------
    loss : scalar array
        The sum to descend.
    policy : scalar array
        Of the clip rule.
    value, kl : scalar array or None
        Before their weights; None where there is no such term.
    ratio : array, shape (B, T) or (B, 1), or None
        The importance ratio that the clip rule acted on.
    """

    loss: Any
    policy: Any
    value: Any
    kl: Any
    ratio: Any


@at_least_float32
def losses(
    algorithm: Algorithm,
    batch: Batch,
    log_probs: Any,
    values: Any = None,
    *,
    kl: Array | None = None,
    entropies: Any = None,
    kl_weight: float = 0.0,
    value_weight: float = 0.5,
    value_clip: float | None = None,
    entropy_weight: float = 0.0,
    sampler_cap: float = 2.0,
    length: float | None = None,
) -> Losses:
    """Losses of any algorithm on a batch of completions.

    Parameters
    ----------
    algorithm : Algorithm
        A row of `ALGORITHMS` or one of your own.
    batch : Batch
        What was sampled.
    log_probs : array, shape (B, T)
        Of the sampled tokens under the policy that is trained.
    values : array, shape (B, T), optional
        Of its value head; then there is a value loss, and the batch needs `returns`.
    kl : array, shape (B, T), optional
        `categorical_kl` from the reference, for ``kl_estimator="exact"``.
    entropies : array, shape (B, T), optional
        `entropy` of the policy, for an entropy bonus.
    kl_weight, value_weight, entropy_weight : float
        β of the KL term in the loss, and the weights of value loss and entropy bonus; at
        least 0.
    value_clip : float, optional
        As `clip_range` of `value_loss`; the batch then needs `old_values`.
    sampler_cap : float
        Largest `importance_weight` of a batch with `sampler_log_probs`.
    length : float, optional
        For ``aggregation="fixed"``, and needed there: usually the limit on a completion.

    Returns
    -------
    Losses
        Each a mean, as the algorithm aggregates; the value loss and the entropy bonus are means
        over tokens.

    Raises
    ------
    ValueError
        If shapes differ, no token counts, or an argument is missing or contradicts the
        algorithm.
    TypeError
        If an array holds integers where real numbers belong.
    """
    weights(kl_weight=kl_weight, value_weight=value_weight, entropy_weight=entropy_weight)
    batch, log_probs = _without_padding(batch, log_probs)
    mask, old_log_probs = batch.mask, batch.old_log_probs
    mean = partial(aggregate, mask=mask, how=algorithm.aggregation, length=length)

    ratio = RATIOS[algorithm.ratio](log_probs, old_log_probs, mask)
    objective = algorithm.clip(ratio, batch.advantages, log_probs)
    if batch.sampler_log_probs is not None:
        weight = importance_weight(old_log_probs, batch.sampler_log_probs, sampler_cap)
        objective = objective * weight
    # A ratio of whole completions stands once; every token of the completion shares it.
    policy = loss = mean(-objective + namespace(log_probs).zeros_like(log_probs))

    value = divergence = None
    if values is not None:
        require("returns", batch.returns, batch.returns is not None, "given for a value loss")
        old_values = None if value_clip is None else batch.old_values
        value = masked_mean(value_loss(values, batch.returns, old_values, value_clip, mask), mask)
        loss = loss + value_weight * value
    if kl_weight > 0 or kl is not None:
        divergence = mean(_divergence(algorithm, batch, log_probs, ratio, kl, kl_weight))
        loss = loss + kl_weight * divergence
    if entropy_weight > 0:
        require("entropies", entropies, entropies is not None, "given for an entropy bonus")
        loss = loss - entropy_weight * masked_mean(entropies, mask)
    return Losses(loss, policy, value, divergence, ratio)


def _without_padding(batch: Batch, log_probs: A) -> tuple[Batch, A]:
    """Check shapes and types; return all with 0 on padding, the batch as constants."""
    require_floats(log_probs=log_probs)
    shape = tuple(getattr(log_probs, "shape", ()))
    mask = as_mask(batch.mask, shape)
    each = {k: v for k, v in vars(batch).items() if k not in ("mask", "tokens", "ref_logits")}
    found = {k: v for k, v in each.items() if v is not None}
    require_floats(**found)
    found = {name: stop_gradient(widen(value)) for name, value in found.items()}
    require_per_token(shape, advantages=batch.advantages)
    some = (
        mask
        if tuple(batch.advantages.shape) == shape
        else namespace(mask).any(mask, axis=-1, keepdims=True)
    )
    advantages = keep(found.pop("advantages"), some)
    require_shape(shape, **found)
    kept = {name: keep(value, mask) for name, value in found.items()}
    return replace(batch, mask=mask, advantages=advantages, **kept), keep(log_probs, mask)


def _divergence(
    algorithm: Algorithm, batch: Batch, log_probs: Any, ratio: Any, kl: Any, kl_weight: float
) -> Any:
    """KL of each token from the reference, as the algorithm has it in its loss."""
    if algorithm.kl != "loss":
        raise ValueError(
            f"kl_weight must be 0 for {algorithm.name}, whose KL term is not in the loss "
            f"(kl={algorithm.kl!r}), got {kl_weight!r}"
        )
    exact = algorithm.kl_estimator == "exact"
    require("kl", kl, (kl is not None) == exact, "given for kl_estimator='exact' alone")
    if exact:
        return kl
    reference: Any = batch.ref_log_probs
    require("ref_log_probs", reference, reference is not None, "given for a KL term in the loss")
    estimator: Any = algorithm.kl_estimator
    weight = ratio if algorithm.kl_weighted else None
    return kl_estimate(log_probs, reference, estimator, ratio=weight)


def policy_loss(
    algorithm: Algorithm,
    log_probs: Array,
    old_log_probs: Array,
    advantages: Array,
    mask: Array,
    *,
    ref_log_probs: Array | None = None,
    sampler_log_probs: Array | None = None,
    kl_weight: float = 0.0,
    sampler_cap: float = 2.0,
    length: float | None = None,
) -> Any:
    """Loss of the policy alone, from arrays: `losses` for those who hold no `Batch`.

    Parameters
    ----------
    algorithm, log_probs, kl_weight, sampler_cap, length
        As for `losses`.
    old_log_probs, advantages, mask, ref_log_probs, sampler_log_probs : array
        As in `Batch`.

    Returns
    -------
    scalar array
        The loss with its KL term, to be minimised.

    Raises
    ------
    ValueError, TypeError
        As `losses`.
    """
    batch = Batch(
        mask=mask,
        old_log_probs=old_log_probs,
        advantages=advantages,
        ref_log_probs=ref_log_probs,
        sampler_log_probs=sampler_log_probs,
    )
    options: dict[str, Any] = {"kl_weight": kl_weight, "sampler_cap": sampler_cap}
    return losses(algorithm, batch, log_probs, length=length, **options).loss


_ADVANTAGES: Mapping[str, Callable[[Any, Any], Any]] = MappingProxyType(
    {
        "leave_one_out": leave_one_out,
        "group_mean": partial(group_relative, scale="none"),
        "group_std": partial(group_relative, scale="group"),
        "mean_relative": partial(group_relative, scale="mean"),
    }
)


@at_least_float32
def completion_advantages(algorithm: Algorithm, rewards: A, valid: Array | None = None) -> A:
    """Advantage of each completion, by the algorithm's estimator.

    Parameters
    ----------
    algorithm : Algorithm
        Any whose advantage is not ``"gae"``.
    rewards : array, shape (prompts, completions)
        One reward per completion.
    valid : array of bool or 0/1, same shape, optional
        False for completions to leave out.

    Returns
    -------
    array, same shape
        The advantages.

    Raises
    ------
    ValueError
        If the algorithm needs a value head, or its estimator more completions.
    """
    kind = algorithm.advantage
    require("advantage", kind, kind != "gae", "one that needs no value head: use `gae` itself")
    if kind == "batch_mean":
        xp = namespace(rewards)
        flat = None if valid is None else xp.reshape(valid, (1, -1))
        centred = group_relative(xp.reshape(rewards, (1, -1)), flat, scale="none")
        return xp.reshape(centred, rewards.shape)
    return _ADVANTAGES[kind](rewards, valid)
