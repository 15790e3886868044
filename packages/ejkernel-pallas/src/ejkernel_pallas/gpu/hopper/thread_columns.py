"""Vectors of which every thread of a warpgroup has one number: a column of one or of a few rows in global memory."""

from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, vector

from ejkernel_pallas.gpu.hopper.registers import int32_constant, unpack_row_value
from ejkernel_pallas.gpu.hopper.sizes import THREADS_PER_WARPGROUP

COLUMN_PER_THREAD = plgpu.Layout.WG_STRIDED((THREADS_PER_WARPGROUP,), vec_size=1)
"""The layout of a vector of 128 numbers, one per thread."""


def fill(value: float) -> jax.Array:
    """Returns a vector of the same number."""
    return plgpu.layout_cast(jnp.full((THREADS_PER_WARPGROUP,), value, jnp.float32), COLUMN_PER_THREAD)


def load_matrix(matrix: Any) -> jax.Array:
    """Loads rows [R, N] of global memory, N a divisor of 128: thread t has column t % N of row t // N, or of the last
    row.
    """
    return _load(matrix, lambda thread: _row_and_column(thread, *matrix.shape))


def load_rows(rows: Any, columns: int) -> jax.Array:
    """Loads a number per row [R] of global memory for threads that have matrices of that many columns."""
    return _load(rows, lambda thread: _row_and_column(thread, rows.shape[0], columns)[:1])


def store_matrix(target: Any, values: jax.Array) -> None:
    """Stores rows that `load_matrix` would load."""
    _store(target, values, lambda thread: _row_and_column(thread, *target.shape))


def store_rows(target: Any, values: jax.Array, columns: int) -> None:
    """Stores a number per row, which all threads of a row have."""
    _store(target, values, lambda thread: _row_and_column(thread, target.shape[0], columns)[:1])


def _load(source: Any, index: Callable[[Any], list[Any]]) -> jax.Array:
    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(()),),
        return_type=plgpu.ShapeDtypeStruct((THREADS_PER_WARPGROUP,), source.dtype, layout=COLUMN_PER_THREAD),
    )
    def load(_: Any, ref: Any) -> Any:
        registers = np.empty((1,), dtype=object)
        vector_type = ir.VectorType.get((1,), ir.MemRefType(ref.type).element_type)
        registers[0] = vector.from_elements(vector_type, [memref.load(ref, index(_thread()))])
        return mgpu.FragmentedArray(
            _registers=registers, _layout=mgpu.WGStridedFragLayout((THREADS_PER_WARPGROUP,), 1), _is_signed=None
        )

    return load(source)  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def _store(target: Any, values: jax.Array, index: Callable[[Any], list[Any]]) -> None:
    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(()), COLUMN_PER_THREAD))
    def store(_: Any, ref: Any, values: Any) -> None:
        memref.store(unpack_row_value(values.registers.flat[0]), ref, index(_thread()))

    store(target, values)  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def _thread() -> Any:
    return arith.remui(mgpu.utils.thread_idx(), int32_constant(THREADS_PER_WARPGROUP))


def _row_and_column(thread: Any, rows: int, columns: int) -> list[Any]:
    row = arith.minui(arith.divui(thread, int32_constant(columns)), int32_constant(rows - 1))
    column = arith.remui(thread, int32_constant(columns))
    return [arith.index_cast(ir.IndexType.get(), x) for x in (row, column)]
