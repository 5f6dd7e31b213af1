"""From rewards to advantages: how much better an action turned out than expected.

Functions over time take rewards and values of shape (..., T) with a mask of the same shape.
Time runs over the tokens where the mask is true, the others are as if they were not there.
Functions over groups take one reward per completion, shape (prompts, completions).
"""

from typing import Any, Literal, TypeAlias, get_args

from ppo_demo._arrays import (
    A,
    Array,
    alike,
    as_mask,
    at_least_float32,
    deviation,
    keep,
    namespace,
    require_floats,
    require_shape,
)
from ppo_demo._checks import at_least, finite, fraction, one_of, require, whole
from ppo_demo.aggregation import masked_mean

Scale: TypeAlias = Literal["none", "group", "batch", "mean"]


@at_least_float32
def discounted_returns(
    rewards: A, mask: Array, gamma: float = 1.0, bootstrap_value: A | None = None
) -> A:
    r"""Sum of the rewards from each token on: :math:`R_t = r_t + \gamma R_{t+1}`.

    Parameters
    ----------
    rewards : array, shape (..., T)
        Reward of each token; padding does not matter.
    mask : array of bool or 0/1, same shape
        True on the completion's tokens.
    gamma : float
        Discount γ, from 0 to 1.
    bootstrap_value : array, shape (...), optional
        Value of the state after the last token, for completions cut off by a limit. At a true
        end there is none: 0.

    Returns
    -------
    array, same shape
        The return; 0 where the mask is false.

    Raises
    ------
    ValueError
        If shapes differ, no token counts or γ is not from 0 to 1.
    TypeError
        If rewards are integers.
    """
    require_floats(rewards=rewards)
    zeros = namespace(rewards).zeros_like(rewards)
    return gae(rewards, zeros, mask, gamma, 1.0, bootstrap_value)[0]


@at_least_float32
def td_residuals(
    rewards: A,
    values: A,
    mask: Array,
    gamma: float = 1.0,
    bootstrap_value: A | None = None,
) -> A:
    r"""One-step advantage: :math:`\delta_t = r_t + \gamma V(s_{t+1}) - V(s_t)`.

    Parameters
    ----------
    rewards, values, mask, gamma, bootstrap_value
        As for `gae`.

    Returns
    -------
    array, same shape
        The residual; 0 where the mask is false.
    """
    return gae(rewards, values, mask, gamma, 0.0, bootstrap_value)[0]


@at_least_float32
def gae(
    rewards: A,
    values: A,
    mask: Array,
    gamma: float = 1.0,
    lam: float = 0.95,
    bootstrap_value: A | None = None,
) -> tuple[A, A]:
    r"""Generalised advantage estimation (Schulman et al. 2016, equation 16).

    .. math:: \hat A_t = \delta_t + \gamma\lambda \hat A_{t+1}, \qquad
              \delta_t = r_t + \gamma V(s_{t+1}) - V(s_t)

    Parameters
    ----------
    rewards : array, shape (..., T)
        Reward of each token; padding does not matter.
    values : array, same shape
        Value of the state in which the token was chosen.
    mask : array of bool or 0/1, same shape
        True on the completion's tokens.
    gamma : float
        Discount γ, from 0 to 1.
    lam : float
        λ, from 0 (one step, low variance) to 1 (all rewards, no bias).
    bootstrap_value : array, shape (...), optional
        Value of the state after the last token, for completions cut off by a limit. At a true
        end there is none: 0.

    Returns
    -------
    advantages, returns : array, same shape
        The estimate, and :math:`\hat A_t + V(s_t)`, the value head's target; 0 where the mask
        is false.

    Raises
    ------
    ValueError
        If shapes differ, no token counts, or γ or λ is not from 0 to 1.
    TypeError
        If rewards or values are integers.
    """
    require_floats(rewards=rewards, values=values)
    xp = namespace(rewards, values)
    fraction(gamma=gamma, lam=lam)
    require_shape(rewards.shape, values=values)
    mask = as_mask(mask, rewards.shape)
    rewards, values = keep(rewards, mask), keep(values, mask)
    none = xp.zeros_like(rewards[..., 0])
    if bootstrap_value is not None:
        require_shape(none.shape, bootstrap_value=bootstrap_value)
    next_value = none if bootstrap_value is None else bootstrap_value
    running = none
    backwards = []
    for t in reversed(range(rewards.shape[-1])):
        here = mask[..., t]
        delta = rewards[..., t] + gamma * next_value - values[..., t]
        running = xp.where(here, delta + gamma * lam * running, running)
        next_value = xp.where(here, values[..., t], next_value)
        backwards.append(keep(running, here))
    advantages = xp.stack(backwards[::-1], axis=-1)
    return advantages, advantages + values


@at_least_float32
def whiten(values: A, mask: Array, *, ddof: int = 0, epsilon: float = 1e-8) -> A:
    r"""Shift and scale to mean 0 and deviation 1 over the real tokens.

    .. math:: \hat x_t = \frac{x_t - \bar x}{\sqrt{\mathrm{var}(x)} + \epsilon}

    Parameters
    ----------
    values : array, any shape
        One value per token or completion.
    mask : array of bool or 0/1, same shape
        True on those that count.
    ddof : int
        Delta degrees of freedom, at least 0: the sum of squares is divided by the count less this.
    epsilon : float
        Added to the deviation, at least 0.

    Returns
    -------
    array, same shape
        Whitened values; 0 where the mask is false, and all 0 without a gradient if values are equal
        but for rounding.

    Raises
    ------
    ValueError
        If no more than `ddof` values count, or the shapes differ.
    TypeError
        If the values are integers.
    """
    require_floats(values=values)
    xp = namespace(values)
    mask = as_mask(mask, values.shape)
    count = xp.sum(xp.astype(mask, values.dtype))
    _check_scale(ddof, epsilon)
    require("mask", mask, count > ddof, f"true for more than ddof={ddof} values")
    # Centred first: E[x²] − mean² would cancel.
    centred = keep(values - masked_mean(values, mask), mask)
    equal = alike(values, mask)
    scale = xp.where(equal, 1, deviation(centred, count - ddof) + epsilon)
    return xp.where(equal, 0, centred / scale)


@at_least_float32
def leave_one_out(rewards: A, valid: Array | None = None) -> A:
    r"""Reward less the mean of the *other* completions of its prompt (RLOO).

    .. math:: A_i = r_i - \frac{1}{G-1} \sum_{j \ne i} r_j = \frac{G}{G-1} (r_i - \bar r)

    (Ahmadian et al. 2024, section 2.2.)

    Parameters
    ----------
    rewards : array, shape (prompts, completions)
        One reward per completion.
    valid : array of bool or 0/1, same shape, optional
        False for completions to leave out: their advantage is 0 and they are in nobody's
        baseline.

    Returns
    -------
    array, same shape
        The advantages.

    Raises
    ------
    ValueError
        If a prompt has fewer than two valid completions, or shapes differ.
    TypeError
        If rewards are integers.
    """
    centred, count = _centred(rewards, valid)
    require("rewards", tuple(rewards.shape), count > 1, "two valid completions or more")
    return centred * count / (count - 1)


@at_least_float32
def group_relative(
    rewards: A,
    valid: Array | None = None,
    *,
    scale: Scale = "group",
    ddof: int = 1,
    epsilon: float = 1e-4,
) -> A:
    r"""Reward less the mean of its prompt's completions, over a scale.

    .. math:: A_i = \frac{r_i - \bar r}{s}

    - ``"group"``: s is the deviation of the group plus ε (GRPO, Shao et al. 2024, section 4.1.2);
    - ``"none"``: s is 1 (Dr. GRPO, Liu et al. 2025, section 3.1);
    - ``"batch"``: s is the deviation of all rewards of the batch plus ε;
    - ``"mean"``: s is the group's mean, for rewards of 0 and 1; where no completion succeeds
      the advantages are 0 (MaxRL, Tajwar et al. 2026).

    Parameters
    ----------
    rewards : array, shape (prompts, completions)
        One reward per completion.
    valid : array of bool or 0/1, same shape, optional
        False for completions to leave out: their advantage is 0 and they are in nobody's
        mean or deviation.
    scale : {"none", "group", "batch", "mean"}
        What to divide by.
    ddof : int
        Delta degrees of freedom of the deviation: 1 as in TRL, 0 as in NumPy.
    epsilon : float
        Added to the deviation, at least 0. A group of equal rewards gets advantages of 0 also
        when it is 0.

    Returns
    -------
    array, same shape
        The advantages.

    Raises
    ------
    ValueError
        If a deviation is asked of too few completions, a reward below 0 is scaled by the mean,
        shapes differ, or the scale is unknown.
    TypeError
        If rewards are integers.
    """
    require_floats(rewards=rewards)
    xp = namespace(rewards)
    one_of(get_args(Scale), scale=scale)
    _check_scale(ddof, epsilon)
    centred, count = _centred(rewards, valid)
    if scale == "none":
        return centred
    if scale == "mean":
        counted: Any = keep(rewards, _present(rewards, valid))
        require("rewards", rewards, counted >= 0, "at least 0 for 'mean'")
        mean = xp.sum(counted, axis=-1, keepdims=True) / count
        return _divide(centred, mean)
    if scale == "batch":
        every, size = _batch_centred(rewards, valid)
    else:
        size, every = count, centred
    shape = tuple(rewards.shape)
    require("rewards", shape, size > ddof, f"more than ddof={ddof} valid completions")
    return _divide(centred, deviation(every, size - ddof, axis=-1) + epsilon)


def _check_scale(ddof: int, epsilon: float) -> None:
    whole(ddof=ddof)
    at_least(0, ddof=ddof, epsilon=epsilon)
    finite(epsilon=epsilon)


def _present(rewards: Array, valid: Array | None) -> Any:
    """Check a group's rewards; return which count, as booleans."""
    require_floats(rewards=rewards)
    xp = namespace(rewards)
    require("rewards", tuple(rewards.shape), rewards.ndim == 2, "of shape (prompts, completions)")
    if valid is None:
        return xp.ones_like(rewards, dtype=xp.bool)
    return as_mask(valid, rewards.shape, "valid")


def _centred(rewards: A, valid: Array | None) -> tuple[Any, Any]:
    """Rewards less their group's mean, and how many count in each group."""
    present = _present(rewards, valid)
    xp = namespace(rewards)
    count = xp.sum(xp.astype(present, rewards.dtype), axis=-1, keepdims=True)
    require("valid", valid, count > 0, "true for a completion of each prompt")
    mean = xp.sum(keep(rewards, present), axis=-1, keepdims=True) / count
    return keep(rewards - mean, present & ~alike(rewards, present, axis=-1)), count


def _batch_centred(rewards: Array, valid: Array | None) -> tuple[Any, Any]:
    """Do the same over the whole batch as one group."""
    xp = namespace(rewards)
    flat = None if valid is None else xp.reshape(valid, (1, -1))
    return _centred(xp.reshape(rewards, (1, -1)), flat)


def _divide(values: Any, by: Any) -> Any:
    """Quotient that is 0 where the divisor is."""
    xp = namespace(values, by)
    return xp.where(by == 0, 0, values / xp.where(by == 0, 1, by))
