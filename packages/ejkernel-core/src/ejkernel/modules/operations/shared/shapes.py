"""Shape and value checks whose messages name the argument, what it got and what it wants."""

import math
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel import _compat
from ejkernel.ops.callers import was_tracer_for_caller
from ejkernel.types.integers import is_int, limit_or_none


def check_shape(name: str, array: Any, axes: str, sizes: dict[str, int], *, broadcast: str = "") -> None:
    """Checks an array's shape against axis names, and learns the sizes of axes seen for the first time.

    Args:
        name: Argument name for the message.
        array: Anything with a shape.
        axes: Space-separated axis names, for example `"B T H D"`.
        sizes: Known sizes by axis name; extended by the axes that do not broadcast.
        broadcast: Those of the axes that may have size 1.

    Raises:
        ValueError: Wrong rank, or a size that contradicts `sizes`.
    """
    shape, names, wide = getattr(array, "shape", None), axes.split(), broadcast.split()
    if shape is None:
        raise ValueError(f"{name}: got {got(array)}, wants an array {describe_axes(names, sizes, wide)}")
    fits = len(shape) == len(names) and all(
        sizes.get(axis, size) == size or (axis in wide and size == 1) for axis, size in zip(names, shape, strict=True)
    )
    if not fits:
        raise ValueError(f"{name}: got shape {tuple(shape)}, wants {describe_axes(names, sizes, wide)}")
    sizes.update((axis, size) for axis, size in zip(names, shape, strict=True) if axis not in wide)


def describe_axes(names: list[str], sizes: Mapping[str, int], broadcast: list[str]) -> str:
    """Returns axes in words, such as `[B=2, T=8, H=4 or 1, D]`: with `or 1` where broadcasting is allowed."""

    def describe(axis: str) -> str:
        size = sizes.get(axis)
        text = axis if size is None else f"{axis}={size}"
        return f"{text} or 1" if axis in broadcast and size != 1 else text

    return f"[{', '.join(map(describe, names))}]"


def check_not_empty(name: str, array: Any, axes: str, checked_axes: str) -> None:
    """Checks that some axes of an array do not have size 0.

    Args:
        name: Argument name for the message.
        array: Anything with a shape that fits `axes`.
        axes: Space-separated axis names.
        checked_axes: The axes that are checked.

    Raises:
        ValueError: A checked axis has size 0.
    """
    sizes = dict(zip(axes.split(), array.shape, strict=True))
    empty = [axis for axis in checked_axes.split() if sizes[axis] == 0]
    if empty:
        raise ValueError(f"{name}: got shape {tuple(array.shape)}, wants {' and '.join(empty)} of at least 1")


def check_dtype(name: str, array: Any, kind: Any, expected: str) -> None:
    """Checks the kind of an array's dtype, for example `jnp.floating`.

    Raises:
        ValueError: The array has a dtype of another kind.
    """
    if not jnp.issubdtype(array.dtype, kind):
        raise ValueError(f"{name}: got dtype {array.dtype}, wants {expected}")


def check_same_dtype(arrays: Mapping[str, Any]) -> None:
    """Checks that all arrays have the dtype of the first.

    Raises:
        ValueError: One differs.
    """
    (first, lead), *others = arrays.items()
    for name, array in others:
        if array.dtype != lead.dtype:
            raise ValueError(f"{name}: got dtype {array.dtype}, wants {first}'s {lead.dtype}")


def check_cumulative_lengths(name: str, lengths: Any, rows: int, size: int) -> None:
    """Checks the values of cumulative lengths, where they can be read: not under a trace.

    Args:
        name: Argument name for the message.
        lengths: Integers, expected to start at 0 and never to decrease.
        rows: 1 for packed sequences, which end within the row; otherwise each fits into a row of its own.
        size: Tokens in a row.

    Raises:
        ValueError: The values are not cumulative lengths of that many rows and that size.
    """
    if _compat.is_tracer(lengths) or not getattr(lengths, "is_fully_addressable", True):
        return
    values = np.asarray(jax.device_get(lengths))
    if values.ndim != 1 or values.size == 0 or values.dtype.kind not in "iu":
        return  # the shape and the dtype are wrong, and `validate` says so
    steps = np.diff(values.astype(np.int64))
    longest = values[-1] if rows == 1 else steps.max(initial=0)
    if values[0] != 0 or (steps < 0).any() or longest > size:
        within = f"end within {size} tokens" if rows == 1 else f"have steps of at most {size} tokens"
        shown = np.array2string(values, threshold=16, separator=", ")
        raise ValueError(f"{name}: got {shown}, wants lengths that start at 0, never decrease and {within}")


def as_number(
    name: str, value: Any, *, minimum: float = -math.inf, greater_than: float = -math.inf, less_than: float = math.inf
) -> float:
    """Returns a finite Python number as float.

    Args:
        name: Argument name for the message.
        value: The argument's value.
        minimum: Smallest accepted value.
        greater_than: Open lower bound.
        less_than: Open upper bound.

    Raises:
        ValueError: The value is not a finite number.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise ValueError(f"{name}: got {got(value)}, wants a Python number")
    number = float(value)
    if not (math.isfinite(number) and number >= minimum and greater_than < number < less_than):
        bounds = {">=": minimum, ">": greater_than, "<": less_than}
        limits = [f"{sign} {bound:g}" for sign, bound in bounds.items() if math.isfinite(bound)]
        raise ValueError(f"{name}: got {value}, wants a finite number {' and '.join(limits)}".rstrip())
    return number


def as_count(name: str, value: Any, minimum: int = 0) -> int:
    """Returns a Python integer.

    Args:
        name: Argument name for the message.
        value: The argument's value.
        minimum: Smallest accepted value.

    Raises:
        ValueError: The value is not an integer, or is smaller than `minimum`.
    """
    if not is_int(value) or value < minimum:
        raise ValueError(f"{name}: got {got(value)}, wants an int of at least {minimum}, fixed when the call is traced")
    return int(value)


def as_flag(name: str, value: Any) -> bool:
    """Returns a Python truth value.

    Raises:
        ValueError: The value is not a truth value.
    """
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name}: got {got(value)}, wants True or False, fixed when the call is traced")
    return bool(value)


def as_window(name: str, window: Any) -> tuple[int | None, int | None] | None:
    """Returns the sliding window of a dense operation as (left, right), inclusive; None where nothing is bounded.

    Args:
        name: Argument name for the message.
        window: `w >= 1`, meaning (w, w), or (left, right), each >= 0 or None for unbounded. A side that no two
            positions are apart, `ejkernel.types.integers.NO_LIMIT` or more, is unbounded too.

    Raises:
        ValueError: The window is not of an accepted form.
    """
    if window is None:
        return None
    pair = window if isinstance(window, tuple) else (window, window)
    least = 0 if isinstance(window, tuple) else 1
    if len(pair) != 2 or not all(side is None or (is_int(side) and side >= least) for side in pair):
        raise ValueError(
            f"{name}: got {got(window)}, wants an int >= 1, or a tuple (left, right) of ints >= 0 or None; "
            "(0, 0) is the diagonal"
        )
    left, right = (None if side is None else limit_or_none(int(side)) for side in pair)
    return None if left is None and right is None else (left, right)


def as_chunk_size(name: str, size: Any) -> int | None:
    """Returns a chunk size that changes results, of positions; None where all positions are one chunk.

    Raises:
        ValueError: The size is neither None nor an int of at least 1.
    """
    return None if size is None else limit_or_none(as_count(name, size, minimum=1))


def as_precision(name: str, value: Any) -> lax.Precision | None:
    """Returns a `jax.lax.Precision`, from itself or its name in any case; None stays None.

    Raises:
        ValueError: The value is neither a precision nor the name of one.
    """
    if value is None:
        return None
    try:
        return lax.Precision(value.lower() if isinstance(value, str) else value)
    except (ValueError, TypeError):
        names = ", ".join(p.name for p in lax.Precision)
        raise ValueError(f"{name}: got {got(value)}, wants one of jax.lax.Precision's {names}") from None


def as_float_dtype(name: str, value: Any) -> np.dtype:
    """Returns a floating dtype.

    Raises:
        ValueError: The value is not a floating dtype.
    """
    try:
        dtype = jnp.dtype("bool" if value is None else value)  # None is NumPy's word for float64
    except TypeError:
        dtype = jnp.dtype("bool")
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"{name}: got {got(value)}, wants a floating dtype")
    return dtype


def as_seed(value: Any) -> Any:
    """Returns a seed with every Python int as uint32: its low 32 bits. Arrays stay as they are."""
    return np.uint32(int(value) % 2**32) if is_int(value) else value


def as_dropout_seed(name: str, value: Any, has_dropout: bool) -> Any:
    """Returns the seed of a call that may drop weights: as `as_seed`, and 0 where none is given to a call that does.

    The first such call of a process warns: without a seed, all of them drop the same pairs.
    """
    if value is not None or not has_dropout:
        return as_seed(value)
    if not _warned_without_seed:
        _warned_without_seed.add(name)
        message = f"{name}: got None, which means 0; every call drops the same pairs until a seed is given"
        warnings.warn(message, UserWarning, stacklevel=6)
    return np.uint32(0)


_warned_without_seed: set[str] = set()


def got(value: Any) -> str:
    """Returns what a caller passed, in words."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        kind = "a traced array" if was_tracer_for_caller(value) else "an array"
        return f"{kind} {value.dtype}[{','.join(map(str, value.shape))}]"
    return f"{type(value).__name__} {value!r}"
