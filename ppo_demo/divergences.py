"""How far a policy has moved from its reference, how spread out it is, and what that costs."""

from typing import Any, Literal, TypeAlias, get_args

from ppo_demo._arrays import (
    MAX_LOG,
    A,
    Array,
    as_arrays,
    as_mask,
    at_least_float32,
    keep,
    log_ratio,
    log_softmax,
    namespace,
    require_floats,
    require_per_token,
    require_shape,
    stop_gradient,
)
from ppo_demo._checks import at_least, finite, fraction, one_of, positive, require, weights

Estimator: TypeAlias = Literal["k1", "k2", "k3"]


@at_least_float32
def categorical_kl(logits: A, ref_logits: A, mask: Array | None = None) -> A:
    r"""Exact KL divergence of two categorical distributions, from the first to the second.

    .. math:: \mathrm{KL}(\pi \,\|\, \pi_\mathrm{ref})
              = \sum_a \pi(a) \left( \log \pi(a) - \log \pi_\mathrm{ref}(a) \right)

    Parameters
    ----------
    logits : array, shape (..., actions)
        Unnormalised log-probabilities of the policy.
    ref_logits : array, shape (..., actions)
        Those of the reference; broadcasts against `logits`, but has as many actions.
    mask : array of bool or 0/1, shape (...), optional
        Where it is false the divergence is 0, whatever stands there.

    Returns
    -------
    array, shape (...)
        The divergence in nats, at least 0. An action that the policy never takes (a logit of −∞)
        adds nothing; one that the reference alone never takes makes it infinite, with no gradient.

    Raises
    ------
    ValueError
        If the mask's shape or the number of actions does not fit.
    TypeError
        If logits are integers.
    """
    require_floats(logits=logits, ref_logits=ref_logits)
    xp = namespace(logits, ref_logits)
    actions = logits.shape[-1:]
    require("ref_logits", ref_logits, ref_logits.shape[-1:] == actions, f"of {actions[0]} actions")
    if mask is not None:
        mask = as_mask(mask, logits.shape[:-1])[..., None]
        logits, ref_logits = keep(logits, mask), keep(ref_logits, mask)
    log_probs: Any = log_softmax(logits)
    ref_log_probs: Any = log_softmax(ref_logits)
    probs = xp.exp(log_probs)
    possible = probs != 0  # NaN is not 0
    lost = possible & (ref_log_probs == -float("inf"))
    gap = xp.where(possible, log_probs, 0) - xp.where(possible & ~lost, ref_log_probs, 0)
    divergence = xp.sum(probs * gap, axis=-1)
    return xp.where(xp.any(lost, axis=-1), float("inf"), divergence)


@at_least_float32
def entropy(logits: A, mask: Array | None = None) -> A:
    r"""Entropy of a categorical distribution: :math:`-\sum_a \pi(a) \log \pi(a)`.

    Parameters
    ----------
    logits : array, shape (..., actions)
        Unnormalised log-probabilities.
    mask : array of bool or 0/1, shape (...), optional
        Where it is false the entropy is 0, whatever stands there.

    Returns
    -------
    array, shape (...)
        The entropy in nats, from 0 to the logarithm of the number of actions. One that is never
        taken (a logit of −∞) adds nothing.

    Raises
    ------
    ValueError
        If the mask's shape does not fit.
    TypeError
        If logits are integers.
    """
    require_floats(logits=logits)
    xp = namespace(logits)
    if mask is None:
        log_probs = log_softmax(logits)
        probs = xp.exp(log_probs)
        return -xp.sum(probs * xp.where(probs != 0, log_probs, 0), axis=-1)
    mask = as_mask(mask, logits.shape[:-1])
    return keep(entropy(keep(logits, mask[..., None])), mask)


@at_least_float32
def kl_estimate(
    log_probs: A,
    ref_log_probs: A,
    estimator: Estimator,
    mask: Array | None = None,
    ratio: A | None = None,
) -> A:
    r"""Estimate the KL divergence of policy from reference at tokens that the *policy* sampled.

    With :math:`d = \log \pi(a) - \log \pi_\mathrm{ref}(a)` (Schulman 2020):

    .. math:: k_1 = d, \qquad k_2 = \tfrac12 d^2, \qquad k_3 = e^{-d} - 1 + d

    As *values*, :math:`k_1` and :math:`k_3` are unbiased and :math:`k_2` is not; :math:`k_2` and
    :math:`k_3` are never negative. As *losses* it is another story: differentiating an
    estimate need not estimate the gradient. In expectation over on-policy tokens,
    :math:`\nabla k_1` is 0, :math:`\nabla k_2` is the gradient of the reverse KL (the one that
    is meant), and :math:`\nabla k_3` that of the *forward* KL. Multiplied by the ratio of policy
    to sampling policy before differentiating, :math:`k_1` and :math:`k_3` give the reverse KL's
    gradient.

    Parameters
    ----------
    log_probs : array, any shape
        Log-probabilities of the sampled tokens under the policy.
    ref_log_probs : array, same shape
        Those under the reference; a constant for the gradient.
    estimator : {"k1", "k2", "k3"}
        Which.
    mask : array of bool or 0/1, same shape, optional
        Where it is false the estimate is 0, whatever stands there.
    ratio : array, same shape or (..., 1), optional
        `probability_ratio` of the policy to the one that sampled, or `sequence_ratio`; gradient
        flows through it.

    Returns
    -------
    array, same shape
        One estimate per token, in nats; 0 where both log-probabilities are −∞. A log-ratio below
        −80 counts as −80 in :math:`k_3` and has no gradient there.

    Raises
    ------
    ValueError
        If the estimator is unknown or shapes differ.
    TypeError
        If log-probabilities are integers.
    """
    one_of(get_args(Estimator), estimator=estimator)
    require_floats(log_probs=log_probs, ref_log_probs=ref_log_probs)
    _, log_probs, ref_log_probs = as_arrays(log_probs, ref_log_probs)
    require_shape(log_probs.shape, ref_log_probs=ref_log_probs)
    if ratio is not None:
        require_floats(ratio=ratio)
        require_per_token(log_probs.shape, ratio=ratio)
    if mask is not None:
        mask = as_mask(mask, log_probs.shape)
        log_probs, ref_log_probs = keep(log_probs, mask), keep(ref_log_probs, mask)
        if ratio is not None and tuple(ratio.shape) == tuple(mask.shape):
            ratio = keep(ratio, mask)
    d = log_ratio(log_probs, stop_gradient(ref_log_probs))
    estimate = {"k1": lambda: d, "k2": lambda: 0.5 * d**2, "k3": lambda: k3(d)}[estimator]()
    estimate = estimate if ratio is None else ratio * estimate
    return estimate if mask is None else keep(estimate, mask)


@at_least_float32
def k3(d: Any) -> Any:
    r"""Return :math:`e^{-d} - 1 + d` without cancellation: never negative, also for small d.

    Parameters
    ----------
    d : array, any shape
        Log-ratio; below −80 it counts as −80, without a gradient.

    Returns
    -------
    array, same shape
        About :math:`d^2 / 2` near 0.
    """
    require_floats(d=d)
    xp, d = as_arrays(d)
    d = xp.clip(d, -MAX_LOG, None)
    # The series is as exact as floats are below this; above it little cancels.
    small = abs(d) < (60 * xp.finfo(d.dtype).eps) ** (1 / 3)
    near = xp.where(small, d, 0)
    return xp.where(small, near**2 / 2 * (1 - near / 3 * (1 - near / 4)), xp.expm1(-d) + d)


def adaptive_kl_weight(
    kl_weight: float, kl: float, *, target: float, horizon: int, samples: int
) -> float:
    r"""Move the KL weight so that the measured KL goes towards a target.

    .. math:: \beta \leftarrow \beta \left( 1 + \min\left(\frac{n}{h}, 1\right) \,
              \mathrm{clip}\left( \frac{\mathrm{KL}}{\mathrm{target}} - 1, -0.2, 0.2 \right) \right)

    (Ziegler et al. 2019, section 2.2, with the batch of n samples over a horizon of h. The minimum
    is ours: without it a batch of more than five horizons makes the weight negative.)

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
    at_least(0, kl_weight=kl_weight, kl=kl)
    positive(target=target, horizon=horizon, samples=samples)
    finite(kl_weight=kl_weight, target=target, horizon=horizon)
    error = min(max(kl / target - 1, -0.2), 0.2)
    return kl_weight * (1 + error * min(samples / horizon, 1))


def linear_kl_weight(first: float, last: float, progress: float) -> float:
    """KL weight that goes from `first` to `last` in a straight line; equal ends keep it fixed.

    Parameters
    ----------
    first, last : float
        β at the beginning and the end of training, at least 0.
    progress : float
        Share of the training that is done, from 0 to 1.

    Returns
    -------
    float
        β now.

    Raises
    ------
    ValueError
        If a weight is negative or `progress` is not from 0 to 1.
    """
    weights(first=first, last=last)
    fraction(progress=progress)
    return first + (last - first) * progress


@at_least_float32
def best_of_n_kl_bound(n: A | float) -> A:
    r"""Bound on the KL divergence of best-of-n from the policy that it samples.

    .. math:: \mathrm{KL} \le \log n - \frac{n - 1}{n}

    Equality holds only without ties and in the limit of a continuous reward (Beirami et al.
    2024, theorem 3.1).

    Parameters
    ----------
    n : array or number
        Samples of which the best is kept, at least 1.

    Returns
    -------
    array, same shape
        The bound in nats for a whole completion.

    Raises
    ------
    ValueError
        If `n` is below 1.
    """
    at_least(1, n=n)
    xp, size = as_arrays(n)
    return xp.log(size) - (size - 1) / size


@at_least_float32
def best_of_n_log_ratio(below: A | float, probability: A | float, n: int) -> A:
    r"""Log-ratio of best-of-n and the policy that it samples, for one completion.

    .. math:: \log \frac{\pi_n(y)}{\pi(y)}
              = \log \frac{\big(F(y) + \pi(y)\big)^n - F(y)^n}{\pi(y)}

    The best of n is y if none of the n scores above y and not all score below it. The mean of
    this over completions of best-of-n is its KL divergence from the policy, at most
    `best_of_n_kl_bound` (Beirami et al. 2024).

    Parameters
    ----------
    below : array
        F, the probability under the policy of a completion that scores lower; from 0 to 1.
    probability : array, same shape
        π, the policy's probability of the completion itself; above 0. Different completions
        score differently.
    n : int
        Samples of which the best is kept, at least 1.

    Returns
    -------
    array, same shape
        At most log n; for n = 1 it is 0.

    Raises
    ------
    ValueError
        If an argument is out of range or the two probabilities add up to more than 1.
    """
    at_least(1, n=n)
    xp, lower, own = as_arrays(below, probability)
    require_floats(below=lower, probability=own)
    require_shape(lower.shape, probability=own)
    fraction(below=lower)
    positive(probability=own)
    total = lower + own
    slack = 8 * xp.finfo(total.dtype).eps
    require("below + probability", total, total <= 1 + slack, "at most 1")
    # The difference of powers without cancellation: a completion is one of very many.
    share = xp.clip(own / total, None, 1 - xp.finfo(total.dtype).eps)
    rest = -xp.expm1(n * xp.log1p(-share))
    return n * xp.log(total) + xp.log(rest) - xp.log(own)
