"""What the formula modules share: one code path for NumPy arrays and PyTorch tensors."""

from typing import Any, TypeAlias

import array_api_compat
import array_api_compat.numpy
from array_api_compat import array_namespace

Array: TypeAlias = Any
"""A NumPy array or PyTorch tensor; Python numbers are taken wherever an array may be a scalar."""

MAX_LOG = 80.0
"""Log-ratios are held to ± this before `exp`: float32 overflows past 88, and 0 · ∞ is NaN."""


def namespace(*values: Array) -> Any:
    """Return the array API namespace of `values`; NumPy's if all are Python numbers.

    Raises
    ------
    TypeError
        If a value is neither a number nor an array, or arrays of two libraries are mixed.
    """
    found = [value for value in values if not isinstance(value, int | float)]
    return array_namespace(*found) if found else array_api_compat.numpy


def as_arrays(*values: Array) -> tuple[Any, ...]:
    """Return the namespace of `values`, then each of them as an array.

    Python numbers take the data type of the arrays beside them, float64 if there is none.
    """
    xp = namespace(*values)
    found = [value for value in values if not isinstance(value, int | float)]
    dtype = xp.result_type(*found) if found else xp.float64
    device = array_api_compat.device(found[0]) if found else None
    return xp, *(
        xp.asarray(value, dtype=dtype, device=device) if isinstance(value, int | float) else value
        for value in values
    )


def require(name: str, value: Array, valid: Array, allowed: str) -> None:
    """Raise a ValueError that names the argument, its value and what is allowed.

    Parameters
    ----------
    name
        The argument's name.
    value
        What was given.
    valid
        A bool, or an array of them; all must hold.
    allowed
        What is allowed, to follow "must be".
    """
    if not bool(valid if isinstance(valid, bool) else valid.all()):
        shown = repr(value)
        if len(shown) > 200:  # a whole batch says less than its size
            shown = f"{type(value).__name__} of shape {tuple(value.shape)}"
        raise ValueError(f"{name} must be {allowed}, got {shown}")


def require_fraction(**arguments: float) -> None:
    """Require every argument to be a number from 0 to 1."""
    for name, value in arguments.items():
        require(name, value, 0 <= value <= 1, "from 0 to 1")


def require_floats(**arguments: Array) -> None:
    """Raise a TypeError for an array of integers: it would round, or have no gradient."""
    for name, value in arguments.items():
        if isinstance(value, int | float):
            continue
        xp = namespace(value)
        if not xp.isdtype(value.dtype, "real floating"):
            raise TypeError(f"{name} must be of a floating-point type, got {value.dtype}")


def require_shape(shape: tuple[int, ...], **arguments: Array) -> None:
    """Require every argument to have this very shape."""
    for name, value in arguments.items():
        found = tuple(value.shape)
        require(name, found, found == tuple(shape), f"of shape {tuple(shape)}")


def as_mask(mask: Array, shape: tuple[int, ...], name: str = "mask") -> Array:
    """Return a mask as booleans after checking its shape and that it is true somewhere."""
    xp = namespace(mask)
    require_shape(shape, **{name: mask})
    mask = xp.astype(mask, xp.bool, copy=False)
    require(name, mask, bool(xp.any(mask)), "true for at least one token")
    return mask


def keep(values: Array, mask: Array) -> Array:
    """Replace what stands where the mask is false by 0, NaN included, in value and gradient."""
    xp = namespace(values, mask)
    return xp.where(mask, values, 0)


def stop_gradient(values: Array) -> Array:
    """Return the same values as constants for the gradient."""
    return values.detach() if hasattr(values, "detach") else values


def safe_exp(log_ratio: Array) -> Array:
    """Exponential of a log-ratio held to ± `MAX_LOG`."""
    xp = namespace(log_ratio)
    return xp.exp(xp.clip(log_ratio, -MAX_LOG, MAX_LOG))


def log_softmax(logits: Array, axis: int = -1) -> Array:
    """Logarithm of the softmax along `axis`, without overflow.

    Parameters
    ----------
    logits : array, any shape
        Unnormalised log-probabilities.
    axis
        The axis over the actions (for a language model, the vocabulary).

    Returns
    -------
    array, same shape
        log π: `logits - log Σ exp(logits)`.
    """
    if hasattr(logits, "log_softmax"):  # PyTorch's own is one pass, forwards and backwards
        return logits.log_softmax(axis)
    xp = namespace(logits)
    shifted = logits - xp.max(logits, axis=axis, keepdims=True)
    return shifted - xp.log(xp.sum(xp.exp(shifted), axis=axis, keepdims=True))
