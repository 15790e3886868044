"""Constant arrays for tests, which NumPy makes.

JAX compiles a program for each shape of `jnp.zeros` and `jnp.arange`, and of `jnp.asarray` where a dtype changes. Tests
have thousands of such arrays. These are JAX's bit by bit, in memory that JAX may update where they are donated. What is
traced, sharded, or of a kind that NumPy might convert otherwise is left to JAX.

The library that is tested gets these functions, too, where it runs outside of `jax.jit`. A test that counts the
programs that are compiled therefore does not see those of its constants.
"""

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel._compat import under_trace

MAX_NUMPY_ELEMENTS = 2**20
"""Longer arrays are left to JAX: there, copying takes longer than compiling."""

XLA_ALIGNMENT_BYTES = 64
"""Of the memory that XLA shares with NumPy on a CPU, in bytes."""

FLOATS = ("float32", "bfloat16", "float16")
INTEGERS = ("int32", "int16", "int8", "uint32", "uint16", "uint8")


def install() -> None:
    """Replaces functions of `jax.numpy` in this process; does nothing when called again."""
    for name, make_constant in MAKERS_OF_CONSTANTS.items():
        function = getattr(jnp, name)
        if function.__module__ != __name__:
            setattr(jnp, name, _backed_by_numpy(function, make_constant))


def to_donatable_jax_array(array: np.ndarray) -> jax.Array:
    """Returns an array of JAX's in memory of its own, which a program may update where the array is donated.

    XLA shares the memory of NumPy's arrays that are aligned to 64 bytes, and copies the others.
    """
    memory = np.empty(array.nbytes + 2 * XLA_ALIGNMENT_BYTES, np.uint8)
    start = -memory.ctypes.data % XLA_ALIGNMENT_BYTES + XLA_ALIGNMENT_BYTES // 2
    unaligned = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    unaligned[...] = array
    return jax.device_put(unaligned)


def _backed_by_numpy(
    function: Callable[..., jax.Array], make_constant: Callable[..., np.ndarray | None]
) -> Callable[..., Any]:
    """Returns the function with the arrays that `make_constant` makes, where it makes one."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def numpy_backed(*args: Any, **kwargs: Any) -> jax.Array:
        if under_trace() or not jax.sharding.get_abstract_mesh().empty:
            return function(*args, **kwargs)
        array = make_constant(**signature.bind(*args, **kwargs).arguments)
        return function(*args, **kwargs) if array is None else to_donatable_jax_array(array)

    numpy_backed.__module__ = __name__
    return numpy_backed


def _canonical_dtype(dtype: Any, default: Any) -> np.dtype | None:
    """Returns the dtype that JAX uses for a given one; None for dtypes that NumPy has not."""
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.extended):
        return None
    return np.dtype(jax.dtypes.canonicalize_dtype(default if dtype is None else dtype))


def _make_filled(value: int, shape: Any, dtype: Any = None, **other_arguments: Any) -> np.ndarray | None:
    sizes = (shape,) if isinstance(shape, int) else shape
    if (
        other_arguments
        or not isinstance(sizes, tuple | list)
        or not all(isinstance(size, int) and size >= 0 for size in sizes)
    ):
        return None
    target = _canonical_dtype(dtype, float)
    if target is None or target.name not in (*FLOATS, *INTEGERS, "bool") or math.prod(sizes) > MAX_NUMPY_ELEMENTS:
        return None
    return np.full(sizes, value, target)


def _make_range(
    start: Any, stop: Any = None, step: Any = None, dtype: Any = None, **other_arguments: Any
) -> np.ndarray | None:
    limits = [limit for limit in (start, stop, step) if limit is not None]
    if (
        other_arguments
        or dtype is not None
        or step == 0
        or (stop is None and step is not None)
        or not all(type(x) is int and abs(x) <= MAX_NUMPY_ELEMENTS for x in limits)
    ):
        return None
    return np.arange(*limits, dtype=jnp.result_type(int))


def _make_converted(values: Any, dtype: Any = None, **other_arguments: Any) -> np.ndarray | None:
    if other_arguments or not (type(values) is np.ndarray or _holds_only_numbers(values)):
        return None
    array = np.asarray(values)
    source, target = _canonical_dtype(array.dtype, float), _canonical_dtype(dtype, array.dtype)
    if (
        source is None
        or target is None
        or array.size > MAX_NUMPY_ELEMENTS
        or not _converts_to_the_same_bits(array, source, target)
    ):
        return None
    # JAX, too, converts to the dtype that it has first.
    return array.astype(source).astype(target)


def _holds_only_numbers(values: Any) -> bool:
    """Returns whether a list holds Python's numbers alone."""
    if isinstance(values, list):
        return bool(values) and all(
            _holds_only_numbers(value) if isinstance(value, list) else type(value) in (bool, int, float)
            for value in values
        )
    return False


def _converts_to_the_same_bits(array: np.ndarray, source: np.dtype, target: np.dtype) -> bool:
    """Returns whether NumPy and JAX convert an array to the same bits."""
    if source.name in FLOATS and target.name in FLOATS:
        return bool(np.all(np.abs(array) < 60000))  # no dtype has less than its largest number
    if array.dtype.kind not in "iub" or target.name not in (*INTEGERS, "bool", "float32"):
        return False
    least, most = (-(2**24), 2**24) if target.kind not in "iu" else (np.iinfo(target).min, np.iinfo(target).max)
    return not array.size or bool(array.min() >= least and array.max() <= most)


MAKERS_OF_CONSTANTS: dict[str, Callable[..., np.ndarray | None]] = {
    "zeros": functools.partial(_make_filled, 0),
    "ones": functools.partial(_make_filled, 1),
    "arange": _make_range,
    "asarray": lambda a, **given: _make_converted(a, **given),
    "array": lambda object, **given: _make_converted(object, **given),
}
"""What makes the arrays of functions of `jax.numpy`; None where JAX has to."""
