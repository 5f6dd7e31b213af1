"""What to watch while a policy trains, under the names that the field uses."""

from typing import Any

from ppo_demo._arrays import (
    A,
    Array,
    alike,
    as_mask,
    at_least_float32,
    deviation,
    keep,
    log_ratio,
    namespace,
    require_floats,
    require_per_token,
    require_shape,
    stop_gradient,
)
from ppo_demo.aggregation import masked_mean
from ppo_demo.divergences import k3
from ppo_demo.surrogates import Clip


@at_least_float32
def clip_fraction(clip: Clip, ratio: A, advantage: Array, mask: Array) -> A:
    """Share of the tokens whose gradient the clip has removed.

    Parameters
    ----------
    clip : Clip
        The rule that the loss used.
    ratio : array, shape (B, T) or (B, 1)
        The ratio that the loss used: one a token, or one a completion.
    advantage : array, shape (B, T) or (B, 1)
        Advantages.
    mask : array of bool or 0/1, shape (B, T)
        True on the tokens that count.

    Returns
    -------
    scalar array
        From 0 to 1; NaN if a ratio or advantage that counts is. Some libraries count every ratio
        outside the range instead, whichever side the advantage favours; that number is at least as
        large.

    Raises
    ------
    ValueError
        If shapes do not fit or no token counts.
    TypeError
        If ratios or advantages are integers.
    """
    require_floats(ratio=ratio, advantage=advantage)
    mask = as_mask(mask, getattr(mask, "shape", ()))
    require_per_token(mask.shape, ratio=ratio, advantage=advantage)
    xp = namespace(ratio)
    removed = xp.astype(clip.removes(ratio, advantage), ratio.dtype)
    # Comparisons with NaN are false: it would count as not clipped.
    removed = xp.where(xp.isnan(ratio) | xp.isnan(advantage), float("nan"), removed)
    return masked_mean(xp.broadcast_to(removed, mask.shape), mask)


@at_least_float32
def approx_kl(log_probs: A, old_log_probs: A, mask: Array) -> A:
    """Divergence of the *old* policy from the new one, estimated on tokens that it sampled.

    The k3 estimator with old and new in the places of policy and reference; what training is
    stopped on when an epoch has gone too far.

    Parameters
    ----------
    log_probs, old_log_probs : array, same shape
        Log-probabilities of the taken actions under new and old policy; the old ones are
        constants for the gradient.
    mask : array of bool or 0/1, same shape
        True on the tokens that count.

    Returns
    -------
    scalar array
        In nats a token, at least 0.

    Raises
    ------
    ValueError
        If shapes differ or no token counts.
    TypeError
        If log-probabilities are integers.
    """
    require_floats(log_probs=log_probs, old_log_probs=old_log_probs)
    mask = as_mask(mask, getattr(log_probs, "shape", ()))
    require_shape(mask.shape, old_log_probs=old_log_probs)
    new, old = keep(log_probs, mask), keep(stop_gradient(old_log_probs), mask)
    return masked_mean(k3(log_ratio(old, new)), mask)


@at_least_float32
def explained_variance(values: A, returns: A, mask: Array) -> A:
    r"""How much of the returns' variance the value head explains.

    .. math:: 1 - \frac{\mathrm{var}(R - V)}{\mathrm{var}(R)}

    Parameters
    ----------
    values, returns : array, same shape
        Predictions and what they should have been.
    mask : array of bool or 0/1, same shape
        True on the tokens that count.

    Returns
    -------
    scalar array
        1 for a perfect value head, 0 for a constant, below 0 for worse; NaN if the returns do
        not vary but for rounding, for then there is nothing to explain.

    Raises
    ------
    ValueError
        If shapes differ or no token counts.
    TypeError
        If values or returns are integers.
    """
    require_floats(values=values, returns=returns)
    xp = namespace(values, returns)
    require_shape(values.shape, returns=returns)
    mask = as_mask(mask, values.shape)

    def spread(x: Any) -> Any:
        return deviation(keep(x - masked_mean(x, mask), mask), 1)

    returns, values = keep(returns, mask), keep(values, mask)
    nothing = alike(returns, mask)
    ratio = spread(returns - values) / xp.where(nothing, 1, spread(returns))
    return xp.where(nothing, float("nan"), 1 - ratio**2)
