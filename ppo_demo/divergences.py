"""How far a policy has moved from its reference."""

from ppo_demo._arrays import Array, log_softmax, namespace, require


def categorical_kl(logits: Array, ref_logits: Array) -> Array:
    r"""Exact KL divergence of two categorical distributions, from the first to the second.

    .. math:: \mathrm{KL}(\pi \,\|\, \pi_\mathrm{ref})
              = \sum_a \pi(a) \left( \log \pi(a) - \log \pi_\mathrm{ref}(a) \right)

    Parameters
    ----------
    logits : array, shape (..., actions)
        Unnormalised log-probabilities of the policy.
    ref_logits : array, shape (..., actions)
        Those of the reference; broadcasts against `logits`.

    Returns
    -------
    array, shape (...)
        The divergence in nats, at least 0.
    """
    xp = namespace(logits, ref_logits)
    log_probs = log_softmax(logits)
    return xp.sum(xp.exp(log_probs) * (log_probs - log_softmax(ref_logits)), axis=-1)


def adaptive_kl_weight(
    kl_weight: float, kl: float, *, target: float, horizon: int, samples: int
) -> float:
    r"""Move the KL weight so that the measured KL goes towards a target.

    .. math:: \beta \leftarrow \beta \left( 1 + \frac{n}{h} \,
              \mathrm{clip}\left( \frac{\mathrm{KL}}{\mathrm{target}} - 1, -0.2, 0.2 \right) \right)

    (Ziegler et al. 2019, section 2.2, with the batch of n samples over a horizon of h.)

    Parameters
    ----------
    kl_weight : float
        β now, at least 0.
    kl, target : float
        Measured and wanted divergence, in the same unit; `target` is above 0.
    horizon : int
        Samples over which β may change by a fifth.
    samples : int
        Samples in the batch on which `kl` was measured.

    Returns
    -------
    float
        β for the next batch.

    Raises
    ------
    ValueError
        If `kl_weight` or `kl` is negative, or `target`, `horizon` or `samples` not above 0.
    """
    for name, value in (("kl_weight", kl_weight), ("kl", kl)):
        require(name, value, value >= 0, "at least 0")
    for name, value in (("target", target), ("horizon", horizon), ("samples", samples)):
        require(name, value, value > 0, "above 0")
    error = min(max(kl / target - 1, -0.2), 0.2)
    return kl_weight * (1 + error * samples / horizon)
