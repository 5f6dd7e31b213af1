"""From per-token values to one number: means that leave padding out."""

from ppo_demo._arrays import Array, namespace, require


def masked_mean(values: Array, mask: Array) -> Array:
    r"""Mean over the real tokens: :math:`\sum_t m_t x_t / \sum_t m_t`.

    Parameters
    ----------
    values : array, any shape
        One value per token. What stands on padding, NaN and infinities included, reaches
        neither the mean nor its gradient.
    mask : array of bool or 0/1, same shape
        True on the tokens that count.

    Returns
    -------
    scalar array
        The mean.

    Raises
    ------
    ValueError
        If the shapes differ or no token counts.
    """
    xp = namespace(values, mask)
    mask = xp.astype(mask, xp.bool)
    require("mask", tuple(mask.shape), mask.shape == values.shape, f"of shape {values.shape}")
    require("mask", mask, xp.any(mask), "true for at least one token")
    # `where`, not a product: NaN times 0 is NaN.
    total = xp.sum(xp.where(mask, values, xp.zeros_like(values)))
    return total / xp.sum(xp.astype(mask, values.dtype))
