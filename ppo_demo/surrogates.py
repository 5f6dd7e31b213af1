"""What the policy maximises at each step: probability ratios and the objectives built on them."""

from typing import Any

from ppo_demo._arrays import (
    Array,
    as_arrays,
    as_mask,
    keep,
    namespace,
    require,
    require_floats,
    require_shape,
    safe_exp,
    stop_gradient,
)


def probability_ratio(log_probs: Array, old_log_probs: Array, mask: Array | None = None) -> Array:
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
        The ratio, above 0; 1 where both policies agree. Log-ratios beyond ±80 count as ±80.

    Raises
    ------
    ValueError
        If the shapes differ.
    TypeError
        If log-probabilities are integers.
    """
    return safe_exp(_log_ratio(log_probs, old_log_probs, mask))


def sequence_ratio(
    log_probs: Array, old_log_probs: Array, mask: Array, *, normalize: bool = True
) -> Array:
    r"""Ratio of whole completions.

    .. math:: s_i = \left( \frac{\pi_\theta(y_i|x_i)}{\pi_\mathrm{old}(y_i|x_i)}
              \right)^{1/|y_i|} = \exp\Big( \frac{1}{|y_i|} \sum_t \log r_{i,t} \Big)

    (GSPO, Zheng et al. 2025, equation 7.) Not normalised, it is the product of the tokens'
    ratios: the exact importance weight of the completion.

    Parameters
    ----------
    log_probs, old_log_probs : array, shape (..., time)
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
    xp = namespace(log_probs, old_log_probs, mask)
    log_ratio = _log_ratio(log_probs, old_log_probs, mask)
    total = xp.sum(log_ratio, axis=-1, keepdims=True)
    if not normalize:
        return safe_exp(total)
    tokens = xp.sum(xp.astype(xp.astype(mask, xp.bool), total.dtype), axis=-1, keepdims=True)
    require("mask", mask, xp.all(tokens > 0), "true for a token of each completion")
    return safe_exp(total / tokens)


def _log_ratio(log_probs: Array, old_log_probs: Array, mask: Array | None) -> Array:
    require_floats(log_probs=log_probs, old_log_probs=old_log_probs)
    require_shape(log_probs.shape, old_log_probs=old_log_probs)
    if mask is not None:
        mask = as_mask(mask, log_probs.shape)
        log_probs, old_log_probs = keep(log_probs, mask), keep(old_log_probs, mask)
    return log_probs - old_log_probs


def clipped_surrogate(
    ratio: Array, advantage: Array, clip_range: Array, clip_range_high: Array | None = None
) -> Array:
    r"""PPO's surrogate objective, to be maximised (Schulman et al. 2017, equation 7).

    .. math:: \min\left( r A,\; \mathrm{clip}(r, 1 - \varepsilon_\mathrm{low},
              1 + \varepsilon_\mathrm{high}) \, A \right)

    Parameters
    ----------
    ratio : array or number
        Probability ratio r.
    advantage : array or number
        Advantage estimate A; broadcasts against `ratio`.
    clip_range : array or number
        ε, above 0; infinity gives the unclipped objective `ratio * advantage`.
    clip_range_high : array or number, optional
        ε of the upper bound, above 0, where it differs: "clip-higher" (DAPO, Yu et al. 2025,
        equation 10). `clip_range` is then that of the lower bound.

    Returns
    -------
    array, the broadcast shape
        The objective. Its gradient is 0 where the ratio has left the range on the side that
        the advantage favours; elsewhere it is that of `ratio * advantage`.

    Raises
    ------
    ValueError
        If a clip range is not above 0.
    TypeError
        If the ratio or advantage is an array of integers.
    """
    high = clip_range if clip_range_high is None else clip_range_high
    require("clip_range", clip_range, clip_range > 0, "above 0")
    require("clip_range_high", high, high > 0, "above 0")
    require_floats(ratio=ratio, advantage=advantage)
    xp, ratio, advantage, low, high = as_arrays(ratio, advantage, clip_range, high)
    clipped = xp.clip(ratio, 1 - low, 1 + high)
    return xp.minimum(ratio * advantage, clipped * advantage)


def dual_clip_surrogate(
    ratio: Array,
    advantage: Array,
    clip_range: Array,
    dual_clip: float,
    clip_range_high: Array | None = None,
) -> Array:
    r"""PPO's surrogate with a floor for negative advantages (Ye et al. 2020, equation 5).

    .. math:: \max\left( \min( r A, \mathrm{clip}(r) A ),\; c A \right)
              \quad\text{where}\quad A < 0

    A ratio that has run away upwards with a negative advantage would otherwise dominate the
    batch; beyond c it has no gradient.

    Parameters
    ----------
    ratio, advantage, clip_range, clip_range_high
        As for `clipped_surrogate`.
    dual_clip : float
        c, above :math:`1 + \varepsilon_\mathrm{high}`.

    Returns
    -------
    array, the broadcast shape
        The objective.

    Raises
    ------
    ValueError
        If `dual_clip` lies within the clip range, or a clip range is not above 0.
    """
    high = clip_range if clip_range_high is None else clip_range_high
    require("dual_clip", dual_clip, dual_clip > 1 + high, "above 1 + clip_range_high")
    objective = clipped_surrogate(ratio, advantage, clip_range, clip_range_high)
    xp, objective, advantage = as_arrays(objective, advantage)
    floor = xp.maximum(objective, dual_clip * advantage)
    return xp.where(advantage < 0, floor, objective)


def clipped_weight_surrogate(
    ratio: Array, advantage: Array, log_probs: Array, max_weight: float
) -> Array:
    r"""CISPO's objective: a clipped importance weight that is a constant for the gradient.

    .. math:: \mathrm{sg}\left( \min(r, w_\mathrm{max}) \right) A \log \pi_\theta

    (MiniMax 2025, equations 4 and 5, without a lower bound, as there.) Every token keeps a
    gradient; only its weight is bounded.

    Parameters
    ----------
    ratio, advantage : array
        Probability ratio and advantage.
    log_probs : array
        Log-probabilities of the taken actions.
    max_weight : float
        Largest weight, above 1.

    Returns
    -------
    array, the broadcast shape
        The objective.

    Raises
    ------
    ValueError
        If `max_weight` is not above 1.
    """
    require("max_weight", max_weight, max_weight > 1, "above 1")
    require_floats(ratio=ratio, advantage=advantage, log_probs=log_probs)
    xp, ratio, advantage, log_probs = as_arrays(ratio, advantage, log_probs)
    return stop_gradient(xp.clip(ratio, None, max_weight)) * advantage * log_probs


def soft_gate_surrogate(
    ratio: Array, advantage: Array, temperature_positive: float, temperature_negative: float
) -> Array:
    r"""SAPO's objective: a sigmoid gate in the place of the clip.

    .. math:: \frac{4}{\tau} \, \sigma\left( \tau (r - 1) \right) A, \qquad
              \tau = \tau_+ \text{ if } A > 0 \text{ else } \tau_-

    (Gao et al. 2025, equations 5 and 6.) At r = 1 its slope is A, as that of `ratio * advantage`;
    away from 1 it fades on both sides.

    Parameters
    ----------
    ratio, advantage : array or number
        Probability ratio and advantage.
    temperature_positive, temperature_negative : float
        How fast the gate fades for positive and for other advantages, above 0.

    Returns
    -------
    array, the broadcast shape
        The objective.

    Raises
    ------
    ValueError
        If a temperature is not above 0.
    """
    for name, value in (
        ("temperature_positive", temperature_positive),
        ("temperature_negative", temperature_negative),
    ):
        require(name, value, value > 0, "above 0")
    require_floats(ratio=ratio, advantage=advantage)
    xp, ratio, advantage = as_arrays(ratio, advantage)
    flat = xp.zeros_like(advantage)
    tau = xp.where(advantage > 0, flat + temperature_positive, flat + temperature_negative)
    return 4 / tau / (1 + safe_exp(-tau * (ratio - 1))) * advantage


def gamma_weight_surrogate(
    weight: Array,
    advantage: Array,
    log_probs: Array,
    shape_positive: tuple[float, float],
    shape_negative: tuple[float, float],
) -> Array:
    r"""VESPO's objective: a smooth weight of the whole completion, constant for the gradient.

    .. math:: \mathrm{sg}\left( w^k e^{\lambda (1 - w)} \right) A \log \pi_\theta

    (Shen et al. 2026.) The weight is 1 at w = 1 and fades on both sides.

    Parameters
    ----------
    weight : array
        Importance weight w of the completion: `sequence_ratio` without normalisation.
    advantage, log_probs : array
        Advantage, and log-probabilities of the taken actions.
    shape_positive, shape_negative : (k, λ)
        For advantages of at least 0, and below; numbers above 0.

    Returns
    -------
    array, the broadcast shape
        The objective.

    Raises
    ------
    ValueError
        If a number of a shape is not above 0.
    """
    for name, pair in (("shape_positive", shape_positive), ("shape_negative", shape_negative)):
        require(name, pair, min(pair) > 0, "two numbers above 0")
    require_floats(weight=weight, advantage=advantage, log_probs=log_probs)
    xp, weight, advantage, log_probs = as_arrays(weight, advantage, log_probs)
    flat = xp.zeros_like(advantage)
    k, lam = (
        xp.where(advantage >= 0, flat + positive, flat + negative)
        for positive, negative in zip(shape_positive, shape_negative, strict=True)
    )
    phi: Any = safe_exp(k * xp.log(weight) + lam * (1 - weight))
    return stop_gradient(phi) * advantage * log_probs


def importance_weight(old_log_probs: Array, sampler_log_probs: Array, max_weight: float) -> Array:
    r"""Weight that corrects for a sampler that is not quite the old policy, truncated.

    .. math:: \min\left( \frac{\pi_\mathrm{old}(a)}{\pi_\mathrm{sampler}(a)},\; C \right)

    (Ionides 2008, section 2.) An inference engine rounds differently from the trainer; the weight
    makes up for it, and the truncation bounds its variance. It is a constant for the gradient.

    Parameters
    ----------
    old_log_probs, sampler_log_probs : array, same shape
        Log-probabilities of the taken actions, recomputed by the trainer and as sampled.
    max_weight : float
        C, at least 1.

    Returns
    -------
    array, same shape
        The weights, above 0.

    Raises
    ------
    ValueError
        If shapes differ or `max_weight` is below 1.
    """
    require("max_weight", max_weight, max_weight >= 1, "at least 1")
    xp = namespace(old_log_probs, sampler_log_probs)
    ratio = probability_ratio(old_log_probs, sampler_log_probs)
    return stop_gradient(xp.clip(ratio, None, max_weight))


def value_loss(
    values: Array,
    returns: Array,
    old_values: Array | None = None,
    clip_range: float | None = None,
    mask: Array | None = None,
) -> Array:
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
        Predictions when the batch was sampled.
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
    xp = namespace(values, returns)
    require_floats(values=values, returns=returns)
    require_shape(values.shape, returns=returns)
    both = (old_values is None) == (clip_range is None)
    require("clip_range", clip_range, both, "given together with old_values")
    if mask is not None:
        mask = as_mask(mask, values.shape)
        values, returns = keep(values, mask), keep(returns, mask)
        old_values = None if old_values is None else keep(old_values, mask)
    loss = 0.5 * (values - returns) ** 2
    if old_values is None or clip_range is None:
        return loss
    require("clip_range", clip_range, clip_range > 0, "above 0")
    require_shape(values.shape, old_values=old_values)
    held = old_values + xp.clip(values - old_values, -clip_range, clip_range)
    return xp.maximum(loss, 0.5 * (held - returns) ** 2)
