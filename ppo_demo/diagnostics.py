"""What to watch while a policy trains, under the names that the field uses."""

from ppo_demo._arrays import Array, as_mask, keep, namespace, require_floats, require_shape
from ppo_demo.aggregation import masked_mean
from ppo_demo.divergences import kl_estimate


def clip_fraction(
    ratio: Array,
    advantage: Array,
    mask: Array,
    clip_range: float,
    clip_range_high: float | None = None,
) -> Array:
    """Share of the tokens whose gradient the clip has removed.

    Parameters
    ----------
    ratio, advantage : array, same shape
        Probability ratios and advantages.
    mask : array of bool or 0/1, same shape
        True on the tokens that count.
    clip_range, clip_range_high : float
        As for `clipped_surrogate`.

    Returns
    -------
    scalar array
        From 0 to 1. Some libraries count every ratio outside the range instead, whichever side
        the advantage favours; that number is at least as large.
    """
    xp = namespace(ratio, advantage, mask)
    require_floats(ratio=ratio, advantage=advantage)
    high = clip_range if clip_range_high is None else clip_range_high
    beyond = (ratio > 1 + high) & (advantage > 0) | (ratio < 1 - clip_range) & (advantage < 0)
    return masked_mean(xp.astype(beyond, ratio.dtype), mask)


def approx_kl(log_probs: Array, old_log_probs: Array, mask: Array) -> Array:
    """Divergence of the *old* policy from the new one, estimated on tokens that it sampled.

    The k3 estimator with old and new in the places of policy and reference; what training is
    stopped on when an epoch has gone too far.

    Parameters
    ----------
    log_probs, old_log_probs : array, same shape
        Log-probabilities of the taken actions under new and old policy.
    mask : array of bool or 0/1, same shape
        True on the tokens that count.

    Returns
    -------
    scalar array
        In nats a token, at least 0.
    """
    return masked_mean(kl_estimate(old_log_probs, log_probs, "k3", mask), mask)


def explained_variance(values: Array, returns: Array, mask: Array) -> Array:
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
        not vary, for then there is nothing to explain.
    """
    xp = namespace(values, returns, mask)
    require_floats(values=values, returns=returns)
    require_shape(values.shape, returns=returns)
    mask = as_mask(mask, values.shape)

    def variance(x: Array) -> Array:
        x = keep(x, mask)
        return masked_mean((x - masked_mean(x, mask)) ** 2, mask)

    spread = variance(returns)
    ratio = variance(returns - values) / xp.where(spread > 0, spread, xp.ones_like(spread))
    return xp.where(spread > 0, 1 - ratio, xp.full_like(spread, float("nan")))
