"""What the formula modules share: one code path for the arrays of NumPy, PyTorch and others."""

from typing import Any, Protocol, TypeVar

import array_api_compat
import array_api_compat.numpy
from array_api_compat import array_namespace

from ppo_demo._checks import require


class Array(Protocol):
    """An array of any library that follows the array API standard: NumPy, PyTorch, JAX and so on.

    Functions that are typed with it return the kind of array that they are given.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def ndim(self) -> int: ...
    @property
    def dtype(self) -> Any: ...
    def __getitem__(self, key: Any, /) -> Any: ...
    def __add__(self, other: Any, /) -> Any: ...
    def __radd__(self, other: Any, /) -> Any: ...
    def __sub__(self, other: Any, /) -> Any: ...
    def __rsub__(self, other: Any, /) -> Any: ...
    def __mul__(self, other: Any, /) -> Any: ...
    def __rmul__(self, other: Any, /) -> Any: ...
    def __truediv__(self, other: Any, /) -> Any: ...
    def __pow__(self, other: Any, /) -> Any: ...
    def __neg__(self) -> Any: ...
    def __lt__(self, other: Any, /) -> Any: ...
    def __gt__(self, other: Any, /) -> Any: ...


A = TypeVar("A", bound=Array)

MAX_LOG = 80.0
"""Log-ratios are held to ± this before `exp`: float32 overflows past 88, and 0 · ∞ is NaN."""


def namespace(*values: Array | float | None) -> Any:
    """Return the array API namespace of `values`; NumPy's if none of them is an array.

    Raises
    ------
    TypeError
        If a value is neither a number nor an array, or arrays of two libraries are mixed.
    """
    found = [value for value in values if not isinstance(value, int | float | None)]
    return array_namespace(*found) if found else array_api_compat.numpy


def as_arrays(*values: Array | float) -> tuple[Any, ...]:
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


def require_floats(**arguments: Array | float) -> None:
    """Raise a TypeError for an array of integers: it would round, or have no gradient."""
    for name, value in arguments.items():
        if isinstance(value, int | float):
            continue
        if not namespace(value).isdtype(value.dtype, "real floating"):
            raise TypeError(f"{name} must be of a floating-point type, got {value.dtype}")


def require_shape(shape: tuple[int, ...], **arguments: Array) -> None:
    """Require every argument to have this very shape."""
    for name, value in arguments.items():
        found = tuple(value.shape)
        require(name, found, found == tuple(shape), f"of shape {tuple(shape)}")


def as_mask(mask: Array, shape: tuple[int, ...], name: str = "mask") -> Any:
    """Return a mask as booleans after checking its shape and that it is true somewhere."""
    xp = namespace(mask)
    require_shape(shape, **{name: mask})
    mask = xp.astype(mask, xp.bool, copy=False)
    require(name, mask, xp.any(mask), "true for at least one token")
    return mask


def keep(values: A, mask: Array) -> A:
    """Replace what stands where the mask is false by 0, NaN included, in value and gradient."""
    xp = namespace(values, mask)
    return xp.where(mask, values, 0)


def stop_gradient(values: A) -> A:
    """Return the same values as constants for the gradient."""
    return values.detach() if hasattr(values, "detach") else values


def safe_exp(log_ratio: A) -> A:
    """Exponential of a log-ratio held to ± `MAX_LOG`."""
    xp = namespace(log_ratio)
    return xp.exp(xp.clip(log_ratio, -MAX_LOG, MAX_LOG))


def log_softmax(logits: A, axis: int = -1) -> A:
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
