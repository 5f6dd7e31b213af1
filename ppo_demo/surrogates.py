"""What the policy maximises at each step: probability ratios, and the clip rules that hold them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, Protocol, runtime_checkable

from ppo_demo._arrays import (
    A,
    Array,
    as_arrays,
    as_mask,
    at_least_float32,
    keep,
    log_ratio,
    namespace,
    require_floats,
    require_shape,
    safe_exp,
    stop_gradient,
    times,
)
from ppo_demo._checks import above, at_least, finite, positive, require


@at_least_float32
def probability_ratio(log_probs: A, old_log_probs: A, mask: Array | None = None) -> A:
    r"""How much likelier the taken action has become: :math:`r_t = \pi_\theta / \pi_\mathrm{old}`.

    Computed as :math:`\exp(\log \pi_\theta(a_t|s_t) - \log \pi_\mathrm{old}(a_t|s_t))`
    (Schulman et al. 2017, section 3).

    Parameters
    ----------
    log_probs : array, any shape
        Log-probabilities of the actions that were taken, under the policy that is trained.
    old_log_probs : array, same shape
        The same under the policy that sampled them; a constant for the gradient.
    mask : array of bool or 0/1, same shape, optional
        Where it is false the ratio is 1 and has no gradient, whatever stands there.

    Returns
    -------
    array, same shape
        The ratio, above 0; 1 where both policies agree, also that the action is impossible.
        Log-ratios beyond ±80 count as ±80, without a gradient.

    Raises
    ------
    ValueError
        If the shapes differ.
    TypeError
        If log-probabilities are integers.
    """
    return safe_exp(_log_ratio(log_probs, old_log_probs, mask))


@at_least_float32
def sequence_ratio(log_probs: A, old_log_probs: A, mask: Array, *, normalize: bool = True) -> A:
    r"""Ratio of whole completions.

    .. math:: s_i = \left( \frac{\pi_\theta(y_i|x_i)}{\pi_\mathrm{old}(y_i|x_i)}
              \right)^{1/|y_i|} = \exp\Big( \frac{1}{|y_i|} \sum_t \log r_{i,t} \Big)

    (GSPO, Zheng et al. 2025, equation 7.) Not normalised, it is the product of the tokens'
    ratios: the exact importance weight of the completion.

    Parameters
    ----------
    log_probs, old_log_probs : array, shape (..., T)
        As for `probability_ratio`.
    mask : array of bool or 0/1, same shape
        True on the completion's own tokens; each completion has one.
    normalize : bool
        Take the geometric mean over the tokens rather than the product.

    Returns
    -------
    array, shape (..., 1)
        One ratio per completion.

    Raises
    ------
    ValueError
        If shapes differ or a completion has no token.
    """
    require_floats(log_probs=log_probs)
    xp = namespace(log_probs)
    mask = as_mask(mask, getattr(log_probs, "shape", ()))
    total = xp.sum(_log_ratio(log_probs, old_log_probs, mask), axis=-1, keepdims=True)
    if not normalize:
        return safe_exp(total)
    tokens = xp.sum(xp.astype(mask, total.dtype), axis=-1, keepdims=True)
    require("mask", mask, tokens > 0, "true for a token of each completion")
    return safe_exp(total / tokens)


def _log_ratio(log_probs: A, old_log_probs: A, mask: Array | None) -> A:
    require_floats(log_probs=log_probs, old_log_probs=old_log_probs)
    _, log_probs, old_log_probs = as_arrays(log_probs, old_log_probs)
    require_shape(log_probs.shape, old_log_probs=old_log_probs)
    if mask is not None:
        mask = as_mask(mask, log_probs.shape)
        log_probs, old_log_probs = keep(log_probs, mask), keep(old_log_probs, mask)
    return log_ratio(log_probs, stop_gradient(old_log_probs))


# --- clip rules: a call returns the objective of each token, to be maximised ---

RATIOS: Mapping[str, Callable[[Any, Any, Any], Any]] = MappingProxyType(
    {
        "none": lambda *_: None,
        "token": lambda new, old, _: probability_ratio(new, old),
        "sequence": sequence_ratio,
        "product": partial(sequence_ratio, normalize=False),
    }
)
"""Kinds of importance ratio: none at all, one a token, or one a completion (the geometric mean or
the product of its tokens'). Each takes log-probabilities, the old ones and the mask; where that is
false both are 0 already."""

ANY_RATIO = ("token", "sequence", "product")


@runtime_checkable
class ClipRule(Protocol):
    """What every clip rule is: a small frozen dataclass that holds its numbers and is called."""

    label: ClassVar[str]
    """What tables call it."""
    ratios: ClassVar[tuple[str, ...]]
    """Which of `RATIOS` it acts on."""

    def __call__(self, ratio: Any, advantage: Any, log_probs: Any = None, /) -> Any:
        """Return the objective.

        Parameters
        ----------
        ratio : array, shape (B, T) or (B, 1), or any that broadcasts
            Probability ratio r; None where there is none.
        advantage : array, broadcasts
            Advantage estimate A; a constant for the gradient.
        log_probs : array, shape (B, T), optional
            Log-probabilities of the taken actions; a rule whose weight is a constant for the
            gradient needs them.

        Returns
        -------
        array, the broadcast shape
            The objective, to be maximised.

        Raises
        ------
        TypeError
            If an array holds integers.
        """


@dataclass(frozen=True)
class Unclipped:
    r"""The policy gradient itself: :math:`r A`, or :math:`A \log \pi_\theta` without a ratio."""

    label: ClassVar[str] = "none"
    ratios: ClassVar[tuple[str, ...]] = tuple(RATIOS)

    @at_least_float32
    def __call__(
        self, ratio: A | float | None, advantage: A | float, log_probs: A | None = None, /
    ) -> A:
        """Return the objective; see `ClipRule`."""
        if ratio is None:
            _, _, adv, logs = _weighted(1.0, advantage, log_probs)
            return times(adv, logs)
        require_floats(ratio=ratio, advantage=advantage)
        _, r, adv = as_arrays(ratio, stop_gradient(advantage))
        return adv * r


@dataclass(frozen=True)
class Clip:
    r"""PPO's clip (Schulman et al. 2017, equation 7).

    .. math:: \min\left( r A,\; \mathrm{clip}(r, 1 - \varepsilon_\mathrm{low},
              1 + \varepsilon_\mathrm{high}) \, A \right)

    The gradient is 0 where the ratio has left the range on the side that the advantage favours;
    elsewhere it is that of :math:`r A`.

    Attributes
    ----------
    clip_range : array or number
        ε, above 0; infinity gives the unclipped objective.
    clip_range_high : array or number, optional
        ε of the upper bound, above 0, where it differs: "clip-higher" (DAPO, Yu et al. 2025,
        equation 10). `clip_range` is then that of the lower bound.

    Raises
    ------
    ValueError
        If a clip range is not above 0.
    """

    clip_range: Any
    clip_range_high: Any = None

    label: ClassVar[str] = "clip"
    ratios: ClassVar[tuple[str, ...]] = ANY_RATIO

    def __post_init__(self) -> None:
        positive(clip_range=self.clip_range, clip_range_high=self.high)

    @property
    def high(self) -> Any:
        """ε of the upper bound."""
        return self.clip_range if self.clip_range_high is None else self.clip_range_high

    @at_least_float32
    def __call__(self, ratio: A | float, advantage: A | float, _: A | None = None, /) -> A:
        """Return the objective; see `ClipRule`."""
        require_floats(ratio=ratio, advantage=advantage)
        xp, r, adv, low, high = as_arrays(
            ratio, stop_gradient(advantage), self.clip_range, self.high
        )
        return xp.minimum(r * adv, xp.clip(r, 1 - low, 1 + high) * adv)

    @at_least_float32
    def removes(self, ratio: Any, advantage: Any) -> Any:
        """Tell where the gradient is removed; bool, the broadcast shape."""
        above, below = ratio > 1 + self.high, ratio < 1 - self.clip_range
        return above & (advantage > 0) | below & (advantage < 0)


@dataclass(frozen=True)
class DualClip(Clip):
    r"""PPO's clip with a floor for negative advantages (Ye et al. 2020, equation 5).

    .. math:: \max\left( \min( r A, \mathrm{clip}(r) A ),\; c A \right)
              \quad\text{where}\quad A < 0

    A ratio that has run away upwards with a negative advantage would otherwise dominate the
    batch; beyond c it has no gradient.

    Attributes
    ----------
    clip_range, clip_range_high : array or number
        As for `Clip`.
    dual_clip : float
        c, above :math:`1 + \varepsilon_\mathrm{high}`.

    Raises
    ------
    ValueError
        If `dual_clip` lies within the clip range, or a clip range is not above 0.
    """

    dual_clip: Any = field(kw_only=True)

    label: ClassVar[str] = "dual clip"

    def __post_init__(self) -> None:
        super().__post_init__()
        above(1 + self.high, "1 + ε", dual_clip=self.dual_clip)

    @at_least_float32
    def __call__(self, ratio: A | float, advantage: A | float, _: A | None = None, /) -> A:
        """Return the objective; see `ClipRule`."""
        clipped: Any = super().__call__(ratio, advantage)
        xp, clipped, adv = as_arrays(clipped, stop_gradient(advantage))
        return xp.where(adv < 0, xp.maximum(clipped, self.dual_clip * adv), clipped)

    @at_least_float32
    def removes(self, ratio: Any, advantage: Any) -> Any:
        """Tell where the gradient is removed; bool, the broadcast shape."""
        return super().removes(ratio, advantage) | (ratio > self.dual_clip) & (advantage < 0)


@dataclass(frozen=True)
class CappedWeight:
    r"""CISPO's rule: a capped importance weight that is a constant for the gradient.

    .. math:: \mathrm{sg}\left( \min(r, w_\mathrm{max}) \right) A \log \pi_\theta

    (MiniMax 2025, equations 4 and 5, without a lower bound, as there.) Every token keeps a
    gradient; only its weight is bounded.

    Attributes
    ----------
    cap : float
        Largest weight, above 1.

    Raises
    ------
    ValueError
        If `cap` is not above 1.
    """

    cap: float

    label: ClassVar[str] = "capped weight"
    ratios: ClassVar[tuple[str, ...]] = ANY_RATIO

    def __post_init__(self) -> None:
        above(1, cap=self.cap)

    @at_least_float32
    def __call__(self, ratio: A | float, advantage: A | float, log_probs: A | None = None, /) -> A:
        """Return the objective; see `ClipRule`."""
        xp, r, adv, logs = _weighted(ratio, advantage, log_probs)
        return times(stop_gradient(xp.clip(r, None, self.cap)) * adv, logs)


@dataclass(frozen=True)
class SoftGate:
    r"""SAPO's rule: a sigmoid gate in the place of the clip.

    .. math:: \frac{4}{\tau} \, \sigma\left( \tau (r - 1) \right) A, \qquad
              \tau = \tau_+ \text{ if } A > 0 \text{ else } \tau_-

    (Gao et al. 2025, equations 5 and 6.) At r = 1 its slope is A, as that of :math:`r A`; away
    from 1 it fades on both sides.

    Attributes
    ----------
    temperature_positive, temperature_negative : float
        How fast the gate fades for positive and for other advantages, above 0.

    Raises
    ------
    ValueError
        If a temperature is not above 0.
    """

    temperature_positive: float
    temperature_negative: float

    label: ClassVar[str] = "soft gate"
    ratios: ClassVar[tuple[str, ...]] = ANY_RATIO

    def __post_init__(self) -> None:
        positive(**vars(self))
        finite(**vars(self))

    @at_least_float32
    def __call__(self, ratio: A | float, advantage: A | float, _: A | None = None, /) -> A:
        """Return the objective; see `ClipRule`."""
        require_floats(ratio=ratio, advantage=advantage)
        xp, r, adv = as_arrays(ratio, stop_gradient(advantage))
        flat = xp.zeros_like(adv)
        tau = xp.where(adv > 0, flat + self.temperature_positive, flat + self.temperature_negative)
        return 4 / tau / (1 + safe_exp(-tau * (r - 1))) * adv


@dataclass(frozen=True)
class GammaWeight:
    r"""VESPO's rule: a smooth weight of the whole completion, constant for the gradient.

    .. math:: \mathrm{sg}\left( w^k e^{\lambda (1 - w)} \right) A \log \pi_\theta

    (Shen et al. 2026.) The ratio w is the product of the tokens' ratios. The weight is 1 at
    w = 1 and fades on both sides.

    Attributes
    ----------
    shape_positive, shape_negative : (k, λ)
        For advantages of at least 0, and below; numbers above 0.

    Raises
    ------
    ValueError
        If a number of a shape is not above 0.
    """

    shape_positive: tuple[float, float]
    shape_negative: tuple[float, float]

    label: ClassVar[str] = "gamma weight"
    ratios: ClassVar[tuple[str, ...]] = ("product",)

    def __post_init__(self) -> None:
        for name, pair in vars(self).items():
            if not (isinstance(pair, tuple) and all(isinstance(n, int | float) for n in pair)):
                raise TypeError(f"{name} must be a pair of numbers, got {pair!r}")
            valid = len(pair) == 2 and all(0 < number < float("inf") for number in pair)
            require(name, pair, valid, "two finite numbers above 0")

    @at_least_float32
    def __call__(self, ratio: A | float, advantage: A | float, log_probs: A | None = None, /) -> A:
        """Return the objective; see `ClipRule`."""
        xp, w, adv, logs = _weighted(ratio, advantage, log_probs)
        flat = xp.zeros_like(adv)
        k, lam = (
            xp.where(adv >= 0, flat + positive, flat + negative)
            for positive, negative in zip(self.shape_positive, self.shape_negative, strict=True)
        )
        return times(stop_gradient(safe_exp(k * xp.log(w) + lam * (1 - w))) * adv, logs)


def _weighted(ratio: Any, advantage: Any, log_probs: Any) -> tuple[Any, ...]:
    """Check and return what a weight that is constant for the gradient acts on."""
    require("log_probs", log_probs, log_probs is not None, "given: the gradient flows through it")
    require_floats(ratio=ratio, advantage=advantage, log_probs=log_probs)
    return as_arrays(ratio, stop_gradient(advantage), log_probs)


@at_least_float32
def importance_weight(old_log_probs: A, sampler_log_probs: A, cap: float) -> A:
    r"""Weight that corrects for a sampler that is not quite the old policy, truncated.

    .. math:: \min\left( \frac{\pi_\mathrm{old}(a)}{\pi_\mathrm{sampler}(a)},\; C \right)

    (Ionides 2008, section 2.) An inference engine rounds differently from the trainer; the weight
    makes up for it, and the truncation bounds its variance. It is a constant for the gradient.

    Parameters
    ----------
    old_log_probs, sampler_log_probs : array, same shape
        Log-probabilities of the taken actions, recomputed by the trainer and as sampled.
    cap : float
        C, at least 1.

    Returns
    -------
    array, same shape
        The weights, above 0.

    Raises
    ------
    ValueError
        If shapes differ or `cap` is below 1.
    """
    at_least(1, cap=cap)
    ratio = probability_ratio(old_log_probs, sampler_log_probs)
    xp = namespace(ratio)
    return stop_gradient(xp.clip(ratio, None, cap))


@at_least_float32
def value_loss(
    values: A,
    returns: A,
    old_values: A | None = None,
    clip_range: float | None = None,
    mask: Array | None = None,
) -> A:
    r"""Squared error of the value head, halved: :math:`\tfrac12 (V(s_t) - R_t)^2`.

    The half is here and nowhere else; the weight of the loss is the caller's. With `old_values`
    and `clip_range`, the larger of this and the error of a prediction that is held within
    ± `clip_range` of the old one (as in the implementations of PPO; not in the paper).

    Parameters
    ----------
    values : array, any shape
        Predictions of the value head.
    returns : array, same shape
        What they should have been; a constant for the gradient.
    old_values : array, same shape, optional
        Predictions when the batch was sampled; constants for the gradient.
    clip_range : float, optional
        How far a prediction may move from the old one and still have a gradient, above 0.
    mask : array of bool or 0/1, same shape, optional
        Where it is false the loss is 0, whatever stands there.

    Returns
    -------
    array, same shape
        The loss per token, to be minimised.

    Raises
    ------
    ValueError
        If shapes differ, `clip_range` is not above 0, or one of `old_values` and `clip_range` is
        given without the other.
    """
    require_floats(values=values, returns=returns)
    xp, values, returns = as_arrays(values, returns)
    require_shape(values.shape, returns=returns)
    both = (old_values is None) == (clip_range is None)
    require("clip_range", clip_range, both, "given together with old_values")
    if old_values is not None:
        require_floats(old_values=old_values)
        require_shape(values.shape, old_values=old_values)
        old_values = stop_gradient(old_values)
        positive(clip_range=clip_range)
    returns = stop_gradient(returns)
    if mask is not None:
        mask = as_mask(mask, values.shape)
        values, returns = keep(values, mask), keep(returns, mask)
        old_values = None if old_values is None else keep(old_values, mask)
    loss = 0.5 * (values - returns) ** 2
    if old_values is None or clip_range is None:
        return loss
    held = old_values + xp.clip(values - old_values, -clip_range, clip_range)
    return xp.maximum(loss, 0.5 * (held - returns) ** 2)
