"""What to watch while a policy trains, under the names that the field uses."""

from typing import Any

from ppo_demo._arrays import A, Array, as_mask, keep, namespace, require_floats, require_shape
from ppo_demo.aggregation import masked_mean
from ppo_demo.divergences import kl_estimate
from ppo_demo.surrogates import Clip


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
        From 0 to 1. Some libraries count every ratio outside the range instead, whichever side
        the advantage favours; that number is at least as large.
    """
    xp = namespace(ratio, advantage, mask)
    require_floats(ratio=ratio, advantage=advantage)
    removed = xp.broadcast_to(clip.removes(ratio, advantage), mask.shape)
    return masked_mean(xp.astype(removed, ratio.dtype), mask)


def approx_kl(log_probs: A, old_log_probs: A, mask: Array) -> A:
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
        not vary, for then there is nothing to explain.
    """
    xp = namespace(values, returns, mask)
    require_floats(values=values, returns=returns)
    require_shape(values.shape, returns=returns)
    mask = as_mask(mask, values.shape)

    def variance(x: Any) -> Any:
        x = keep(x, mask)
        return masked_mean((x - masked_mean(x, mask)) ** 2, mask)

    total = variance(returns)
    ratio = variance(returns - values) / xp.where(total > 0, total, 1)
    return xp.where(total > 0, 1 - ratio, float("nan"))
