"""What PPO maximises at each step: the probability ratio and the objectives built on it."""

from ppo_demo._arrays import Array, as_arrays, namespace, require


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
        The ratio, above 0; 1 where both policies agree.
    """
    xp = namespace(log_probs, old_log_probs)
    log_ratio = log_probs - old_log_probs
    if mask is not None:
        log_ratio = xp.where(xp.astype(mask, xp.bool), log_ratio, xp.zeros_like(log_ratio))
    return xp.exp(log_ratio)


def clipped_surrogate(ratio: Array, advantage: Array, clip_range: Array) -> Array:
    r"""PPO's surrogate objective, to be maximised (Schulman et al. 2017, equation 7).

    .. math:: \min\left( r A,\; \mathrm{clip}(r, 1 - \varepsilon, 1 + \varepsilon) \, A \right)

    Parameters
    ----------
    ratio : array or number
        Probability ratio r.
    advantage : array or number
        Advantage estimate A; broadcasts against `ratio`.
    clip_range : array or number
        ε, above 0; infinity gives the unclipped objective `ratio * advantage`.

    Returns
    -------
    array, the broadcast shape
        The objective. Its gradient is 0 where the ratio has left the range on the side that
        the advantage favours; elsewhere it is that of `ratio * advantage`.

    Raises
    ------
    ValueError
        If `clip_range` is not above 0.
    """
    require("clip_range", clip_range, clip_range > 0, "above 0")
    xp, ratio, advantage, clip_range = as_arrays(ratio, advantage, clip_range)
    clipped = xp.clip(ratio, 1 - clip_range, 1 + clip_range)
    return xp.minimum(ratio * advantage, clipped * advantage)


def value_loss(values: Array, returns: Array) -> Array:
    r"""Squared error of the value head, halved: :math:`\tfrac12 (V(s_t) - R_t)^2`.

    The half is here and nowhere else; the weight of the loss is the caller's.

    Parameters
    ----------
    values : array, any shape
        Predictions of the value head.
    returns : array, same shape
        What they should have been; a constant for the gradient.

    Returns
    -------
    array, same shape
        The loss per token, to be minimised.
    """
    return 0.5 * (values - returns) ** 2
