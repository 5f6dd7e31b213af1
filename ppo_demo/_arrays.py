"""What the formula modules share: one code path for the arrays of NumPy, PyTorch and others."""

from collections.abc import Callable
from dataclasses import is_dataclass, replace
from functools import cache, wraps
from inspect import signature
from typing import Any, ParamSpec, Protocol, TypeVar

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
P = ParamSpec("P")
R = TypeVar("R")

MAX_LOG = 80.0
"""Log-ratios are held to ± this before `exp`: float32 overflows past 88, and 0 · ∞ is NaN."""


_PLAIN = (int, float, type(None))
_NAMESPACES: dict[type, Any] = {}  # to ask once for each kind of array: formulas ask all the time


def namespace(*values: Array | float | None) -> Any:
    """Return the array API namespace of `values`; NumPy's if none of them is an array.

    Raises
    ------
    TypeError
        If a value is neither a number nor an array, or arrays of two libraries are mixed.
    """
    found = [value for value in values if not isinstance(value, _PLAIN)]
    if not found:
        return array_api_compat.numpy
    for value in found:
        if type(value) not in _NAMESPACES:
            _NAMESPACES[type(value)] = array_namespace(value)
    first = _NAMESPACES[type(found[0])]
    same = all(_NAMESPACES[type(value)] is first for value in found[1:])
    return first if same else array_namespace(*found)


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


# --- precision ---


@cache
def _is_half(dtype: Any) -> bool:
    return str(dtype).endswith("float16")  # float16 and bfloat16, of any library


def widen(value: Any) -> Any:
    """Return an array of half precision as float32, anything else as it is."""
    half = _is_half(getattr(value, "dtype", None))
    return namespace(value).astype(value, namespace(value).float32) if half else value


def _narrow(value: Any, dtype: Any) -> Any:
    """Return float arrays, in a tuple or dataclass too, as `dtype`; what is finite stays so."""
    if isinstance(value, tuple):
        return tuple(_narrow(v, dtype) for v in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{k: _narrow(v, dtype) for k, v in vars(value).items()})
    if not array_api_compat.is_array_api_obj(value):
        return value
    xp = namespace(value)
    if not xp.isdtype(value.dtype, "real floating"):
        return value
    largest = float(xp.finfo(dtype).max)
    held = xp.where(abs(value) < float("inf"), xp.clip(value, -largest, largest), value)
    return xp.astype(held, dtype)


def at_least_float32(function: Callable[P, R]) -> Callable[P, R]:
    """Let a formula compute in float32 where its arrays are of half precision.

    This is the one place for it, and every formula of the package is wrapped in it. The result is
    of the type that the arguments have together, masks aside: sums in half precision stop growing
    (a bfloat16 at 256), squares overflow (a float16 at 256²), and the exponential of a log-ratio
    does from 11 on. A finite result that half precision cannot hold becomes its largest number.
    """
    names = tuple(signature(function).parameters)

    @wraps(function)
    def computed(*args: P.args, **kwargs: P.kwargs) -> R:
        if not any(_is_half(getattr(v, "dtype", None)) for v in (*args, *kwargs.values())):
            return function(*args, **kwargs)
        given: dict[str, Any] = {**dict(zip(names, args, strict=False)), **kwargs}
        floats = [
            value
            for name, value in given.items()
            if hasattr(value, "dtype")
            and name not in ("mask", "valid")
            and namespace(value).isdtype(value.dtype, "real floating")
        ]
        wide: Any = {k: widen(v) for k, v in kwargs.items()}
        found = function(*map(widen, args), **wide)
        dtype = namespace(*floats).result_type(*floats) if floats else None
        return _narrow(found, dtype) if _is_half(dtype) else found

    return computed


# --- what may be given ---


def _is_array(value: Any) -> bool:
    return type(value) in _NAMESPACES or bool(array_api_compat.is_array_api_obj(value))


def require_floats(**arguments: Any) -> None:
    """Raise a TypeError for what is no array of real numbers: integers would round."""
    for name, value in arguments.items():
        if isinstance(value, int | float):
            continue
        if not _is_array(value):
            raise TypeError(f"{name} must be an array or a number, got {value!r}")
        if not namespace(value).isdtype(value.dtype, "real floating"):
            raise TypeError(f"{name} must be of a floating-point type, got {value.dtype}")


def require_shape(shape: tuple[int, ...], **arguments: Array | float) -> None:
    """Require every argument to have this very shape; a number has shape ()."""
    for name, value in arguments.items():
        found = tuple(getattr(value, "shape", ()))
        require(name, found, found == tuple(shape), f"of shape {tuple(shape)}")


def require_per_token(shape: tuple[int, ...], **arguments: Array | float) -> None:
    """Require every argument to have this very shape, or one number for each completion."""
    each = (*shape[:-1], 1)
    for name, value in arguments.items():
        found = tuple(getattr(value, "shape", ()))
        fits = found in (tuple(shape), each)
        require(name, found, fits, f"of shape {tuple(shape)} or {each}")


def as_mask(mask: Any, shape: tuple[int, ...], name: str = "mask") -> Any:
    """Return a mask as booleans after checking it: its shape, its values, one of them true.

    Raises
    ------
    ValueError
        If a value is neither true nor false, nor exactly 0 or 1: additive masks (0 and −∞) would
        select the padding.
    TypeError
        If it is no array of such numbers.
    """
    if not _is_array(mask):
        raise TypeError(f"{name} must be an array of bool or of 0 and 1, got {mask!r}")
    xp = namespace(mask)
    require_shape(shape, **{name: mask})
    if mask.dtype != xp.bool:
        if not xp.isdtype(mask.dtype, ("integral", "real floating")):
            raise TypeError(f"{name} must be of bool or of 0 and 1, got {mask.dtype}")
        require(name, mask, (mask == 0) | (mask == 1), "true or false, or exactly 0 or 1")
        mask = xp.astype(mask, xp.bool)
    require(name, mask, xp.any(mask), "true for at least one token")
    return mask


# --- what every formula needs ---


def keep(values: A, mask: Array) -> A:
    """Replace what stands where the mask is false by 0, NaN included, in value and gradient."""
    xp = namespace(values, mask)
    return xp.where(mask, values, 0)


def stop_gradient(values: Any) -> Any:
    """Return the same values as constants for the gradient."""
    if hasattr(values, "detach"):
        return values.detach()
    if array_api_compat.is_jax_array(values):
        from jax.lax import stop_gradient as stop

        return stop(values)
    return values


def safe_exp(log_ratio: A) -> A:
    """Exponential of a log-ratio held to ± `MAX_LOG`."""
    xp = namespace(log_ratio)
    return xp.exp(xp.clip(log_ratio, -MAX_LOG, MAX_LOG))


def log_ratio(log_probs: Any, other: Any) -> Any:
    """Difference of log-probabilities; 0 where both are −∞: what neither can choose is alike."""
    xp = namespace(log_probs, other)
    never = (log_probs == -float("inf")) & (other == -float("inf"))
    if not xp.any(never):
        return log_probs - other
    return xp.where(never, 0, log_probs) - xp.where(never, 0, other)


def times(factor: Any, values: Any) -> Any:
    """Product in which 0 times an infinity is 0, in value and gradient; NaN stays NaN."""
    xp = namespace(factor, values)
    return factor * xp.where((factor == 0) & (abs(values) == float("inf")), 0, values)


def alike(values: Any, mask: Array, axis: int | None = None) -> Any:
    """Tell whether values are equal but for rounding; NaN is like nothing.

    They are if they span no more than 8 times the spacing of floats at the largest of them. In
    float32 that is a millionth of it.

    Parameters
    ----------
    values : array
        Of float32 or float64.
    mask : array of bool, same shape
        Which count.
    axis : int, optional
        Compare along this axis, which is kept; by default, all.

    Returns
    -------
    array of bool
        The comparison.
    """
    xp = namespace(values, mask)
    options = {"axis": axis, "keepdims": axis is not None}
    low = xp.min(xp.where(mask, values, float("inf")), **options)
    high = xp.max(xp.where(mask, values, -float("inf")), **options)
    size = xp.maximum(abs(low), abs(high))
    return high - low <= 8 * xp.finfo(values.dtype).eps * size


def deviation(centred: Any, size: Any, axis: int | None = None) -> Any:
    """Square root of the sum of squares over `size`; large and small numbers are scaled first."""
    xp = namespace(centred)
    options = {"axis": axis, "keepdims": axis is not None}
    largest = xp.max(abs(stop_gradient(centred)), **options)
    plain = (largest > 1e-15) & (largest < 1e15) | (largest == 0)
    scale = xp.where(plain, 1, largest)
    squares = xp.sum((centred / scale) ** 2, **options) / size
    flat = squares == 0  # the root has no slope there
    return scale * xp.where(flat, 0, xp.sqrt(xp.where(flat, 1, squares)))


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
