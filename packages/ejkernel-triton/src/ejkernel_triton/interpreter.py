"""Runs kernels in Triton's interpreter on NumPy arrays.

The interpreter expects PyTorch tensors, of which it uses the few methods that `_TensorShim` has.
"""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ejkernel_triton import _compat

# The interpreter has global state, and JAX may run callbacks of several devices at the same time.
_interpreter_lock = threading.Lock()


class _TensorShim:
    """A NumPy array with the methods of a PyTorch tensor, and of its storage, that the interpreter calls."""

    def __init__(self, array: np.ndarray, dtype: str) -> None:
        self.array = array
        self.dtype = dtype

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def untyped_storage(self) -> "_TensorShim":
        return self

    def cpu(self) -> "_TensorShim":
        return self

    def new_empty(self, size: int, device: str) -> "_TensorShim":
        return _TensorShim(self.array, self.dtype)

    def set_(self, storage: "_TensorShim", *layout: Any) -> None:
        self.array = storage.array

    def copy_(self, other: "_TensorShim") -> None:
        """Does nothing, since `cpu` made no copy."""

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self.array.shape

    def stride(self) -> tuple[int, ...]:
        return self.array.strides


def run(
    kernel: Any,
    inputs: Sequence[Any],
    output_shapes: Sequence[Any],
    grid: int,
    constants: Mapping[str, Any],
    aliases: Mapping[int, int],
) -> tuple[np.ndarray, ...]:
    """Runs all programs of a kernel, one after the other.

    Args:
        kernel: A kernel that `triton.jit` made with TRITON_INTERPRET=1.
        inputs: Arrays.
        output_shapes: Shapes and dtypes; they start as NaN, or as the smallest integer, except for aliases.
        grid: Programs.
        constants: The `tl.constexpr` arguments.
        aliases: Input index -> index of the output that starts as that input.

    Returns:
        The outputs.
    """
    # Kernels compute addresses from shapes alone, so arrays must be contiguous.
    input_arrays = [np.ascontiguousarray(np.asarray(x)) for x in inputs]
    # Elements that a kernel does not write are NaN, or the smallest integer, so that reading them shows in the result.
    output_arrays = [np.full(x.shape, _poison_value(x.dtype), x.dtype) for x in output_shapes]
    for source, target in aliases.items():
        output_arrays[target][...] = input_arrays[source]
    tensors = [_TensorShim(x, str(x.dtype)) for x in (*input_arrays, *output_arrays)]
    _compat.patch_interpreter()
    # Masked lanes are computed too, so overflow and NaN in them are no errors.
    with _interpreter_lock, np.errstate(all="ignore"):
        kernel[(grid,)](*tensors, **constants)
    return tuple(output_arrays)


def _poison_value(dtype: Any) -> Any:
    return np.nan if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min
