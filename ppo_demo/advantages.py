"""From rewards to advantages: how much better an action turned out than expected."""

from ppo_demo._arrays import Array, namespace, require
from ppo_demo.aggregation import masked_mean


def whiten(values: Array, mask: Array, *, ddof: int = 0, epsilon: float = 1e-8) -> Array:
    r"""Shift and scale to mean 0 and deviation 1 over the real tokens.

    .. math:: \hat x_t = \frac{x_t - \bar x}{\sqrt{\mathrm{var}(x)} + \epsilon}

    Parameters
    ----------
    values : array, any shape
        One value per token or completion.
    mask : array of bool or 0/1, same shape
        True on those that count.
    ddof : int
        Delta degrees of freedom: the sum of squares is divided by the count less this.
    epsilon : float
        Added to the deviation, so that equal values become 0.

    Returns
    -------
    array, same shape
        Whitened values; 0 where the mask is false.

    Raises
    ------
    ValueError
        If no more than `ddof` values count, or the shapes differ.
    """
    xp = namespace(values, mask)
    mask = xp.astype(mask, xp.bool)
    count = xp.sum(xp.astype(mask, values.dtype))
    require("mask", mask, count > ddof, f"true for more than ddof={ddof} values")
    centred = values - masked_mean(values, mask)
    # Centred first: E[x²] − mean² would cancel.
    variance = masked_mean(centred**2, mask) * count / (count - ddof)
    return xp.where(mask, centred / (xp.sqrt(variance) + epsilon), xp.zeros_like(centred))
