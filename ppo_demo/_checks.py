"""The one way to refuse an argument: a ValueError that names it, its value and what is allowed."""

from collections.abc import Collection, Iterator
from typing import Any

from array_api_compat import array_namespace, is_array_api_obj


def require(name: str, value: Any, valid: Any, allowed: str) -> None:
    """Raise unless `valid` holds.

    Parameters
    ----------
    name : str
        The argument's name.
    value
        What was given.
    valid : bool or array of bool
        Whether that is allowed; of an array all must hold.
    allowed : str
        What is allowed, to follow "must be".

    Raises
    ------
    ValueError
        "NAME must be ALLOWED, got VALUE"; a long value is shown by its shape.
    """
    if is_array_api_obj(valid):
        valid = array_namespace(valid).all(valid)
    if not bool(valid):
        shown = repr(value.item() if getattr(value, "shape", None) == () else value)
        if len(shown) > 200 and hasattr(value, "shape"):  # a whole batch says less than its size
            shown = f"{type(value).__name__} of shape {tuple(value.shape)}"
        raise ValueError(f"{name} must be {allowed}, got {shown}")


def _numbers(arguments: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the arguments after checking that each is a number or an array."""
    for name, value in arguments.items():
        if not (isinstance(value, int | float) or is_array_api_obj(value)):
            raise TypeError(f"{name} must be a number, got {value!r}")
        yield name, value


def above(minimum: Any, said: str = "", **arguments: Any) -> None:
    """Require numbers, or arrays of them, above `minimum`; infinity is, NaN is not."""
    for name, value in _numbers(arguments):
        require(name, value, value > minimum, f"above {said or f'{minimum:g}'}")


def positive(**arguments: Any) -> None:
    """Require numbers, or arrays of them, above 0; infinity is, NaN is not."""
    above(0, **arguments)


def at_least(minimum: float, **arguments: Any) -> None:
    """Require numbers, or arrays of them, of `minimum` or more."""
    for name, value in _numbers(arguments):
        require(name, value, value >= minimum, f"at least {minimum:g}")


def fraction(**arguments: Any) -> None:
    """Require numbers, or arrays of them, from 0 to 1."""
    for name, value in _numbers(arguments):
        require(name, value, (value >= 0) & (value <= 1), "from 0 to 1")


def finite(**arguments: Any) -> None:
    """Require numbers, or arrays of them, that are neither infinite nor NaN."""
    for name, value in _numbers(arguments):
        require(name, value, abs(value) < float("inf"), "finite")


def weights(**arguments: Any) -> None:
    """Require finite numbers, or arrays of them, of 0 or more."""
    at_least(0, **arguments)
    finite(**arguments)


def whole(**arguments: Any) -> None:
    """Require integers."""
    for name, value in arguments.items():
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise TypeError(f"{name} must be a whole number, got {value!r}")


def one_of(choices: Collection[Any], **arguments: Any) -> None:
    """Require one of a few values."""
    for name, value in arguments.items():
        require(name, value, value in choices, f"one of {', '.join(map(str, choices))}")
