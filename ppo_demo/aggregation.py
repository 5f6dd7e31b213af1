"""From per-token values to one number: means that leave padding out."""

from typing import Literal, TypeAlias, get_args

from ppo_demo._arrays import A, Array, as_mask, at_least_float32, keep, namespace, require_floats
from ppo_demo._checks import finite, one_of, positive, require

Aggregation: TypeAlias = Literal["token", "sequence", "fixed", "sum"]


@at_least_float32
def masked_mean(values: A, mask: Array) -> A:
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
    TypeError
        If the values are integers.
    """
    require_floats(values=values)
    xp = namespace(values)
    mask = as_mask(mask, values.shape)
    return xp.sum(keep(values, mask)) / xp.sum(xp.astype(mask, values.dtype))


@at_least_float32
def aggregate(values: A, mask: Array, how: Aggregation, *, length: float | None = None) -> A:
    r"""Turn per-token losses of a batch of completions into one loss.

    With completions :math:`i` of :math:`n_i` tokens, B of them:

    - ``"token"``: :math:`\sum_{i,t} x_{i,t} / \sum_i n_i`, every token alike (DAPO, Yu et al.
      2025, equation 12);
    - ``"sequence"``: :math:`\frac1B \sum_i \frac{1}{n_i} \sum_t x_{i,t}`, every completion alike
      (GRPO, Shao et al. 2024, equation 3);
    - ``"fixed"``: :math:`\frac1B \sum_i \frac1L \sum_t x_{i,t}` with one length L for all
      (Dr. GRPO, Liu et al. 2025, appendix A);
    - ``"sum"``: the same with :math:`L = 1`: the log-probability of a whole completion is the
      sum of its tokens' (REINFORCE, RLOO).

    Parameters
    ----------
    values : array, shape (B, T)
        Loss per token; padding does not matter.
    mask : array of bool or 0/1, same shape
        True on the completions' tokens.
    how : {"token", "sequence", "fixed", "sum"}
        The rule.
    length : float, optional
        L, above 0 and finite; for ``"fixed"`` alone, and needed there.

    Returns
    -------
    scalar array
        The loss.

    Raises
    ------
    ValueError
        If the rule is unknown, shapes differ, a completion has no token, or `length` is missing
        or out of place.
    """
    one_of(get_args(Aggregation), how=how)
    require("length", length, (length is not None) == (how == "fixed"), "given for 'fixed' alone")
    if how == "token":
        return masked_mean(values, mask)
    require_floats(values=values)
    xp = namespace(values)
    mask = as_mask(mask, values.shape)
    tokens = xp.sum(xp.astype(mask, values.dtype), axis=-1)
    totals = xp.sum(keep(values, mask), axis=-1)
    if how == "sequence":
        require("mask", mask, tokens > 0, "true for at least one token of each completion")
        return xp.mean(totals / tokens)
    size = 1.0 if length is None else length
    positive(length=size)
    finite(length=size)
    return xp.mean(totals) / size
