"""Arrays of one tile of scores in the registers of a warpgroup."""

import inspect
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from ejkernel_pallas.gpu.hopper.layouts import COLUMN_LAYOUT, ROW_LAYOUT
from ejkernel_pallas.gpu.hopper.registers import constant, i32, scalar, with_registers


def over_columns(rows: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """A value for every row, for all columns."""
    return lax.broadcast_in_dim(rows, shape, [0])


def over_rows(columns: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """A value for every column, for all rows."""
    return lax.broadcast_in_dim(columns, shape, [1])


def full_rows(rows: int, value: float) -> jax.Array:
    """The same value for every row of a tile."""
    return plgpu.layout_cast(jnp.full((rows,), value, jnp.float32), ROW_LAYOUT)


def full_tile(shape: tuple[int, int]) -> jax.Array:
    """A tile of zeros."""
    return plgpu.layout_cast(jnp.full(shape, 0, jnp.float32), plgpu.Layout.WGMMA)


def load_rows(vector: Any) -> jax.Array:
    """A value for every row, from shared memory."""
    return _load(vector, ROW_LAYOUT)


def load_columns(vector: Any) -> jax.Array:
    """A value for every column, from shared memory."""
    return _load(vector, COLUMN_LAYOUT)


def _load(vector: Any, layout: Any) -> jax.Array:
    # JAX 0.10 wants an index, which is deprecated in 0.11 and gone in 0.12.
    index = inspect.signature(plgpu.load).parameters.get("idx")
    indexed = {} if index is None or index.default is not inspect.Parameter.empty else {"idx": ()}
    return plgpu.load(vector, **indexed, layout=layout, optimized=False)


def widened(tile: jax.Array) -> jax.Array:
    """A tile in float32.

    Of bfloat16 it takes the halves of registers apart as integers: LLVM would keep halves beside the pairs that
    products take, in registers that there are not enough of.
    """
    if tile.dtype != jnp.bfloat16:
        return tile.astype(jnp.float32)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA,),
        return_type=plgpu.ShapeDtypeStruct(tile.shape, jnp.float32, layout=plgpu.Layout.WGMMA),
    )
    def widen(_: Any, narrow: Any) -> Any:
        f32 = ir.F32Type.get()
        made: list[Any] = []
        for register in narrow.registers.flat:
            # bfloat16 is the upper half of a float32: the first of a pair is shifted there; the second is there, and
            # the first is masked away.
            both = scalar(vector.bitcast(ir.VectorType.get((1,), i32()), register))
            halves = (arith.shli(both, constant(16)), arith.andi(both, constant(-(2**16))))
            made.append(vector.from_elements(ir.VectorType.get((2,), f32), [arith.bitcast(f32, x) for x in halves]))
        return with_registers(narrow, made)

    return widen(tile)  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def load_tile(tile: Any) -> jax.Array:
    """A tile of scores, from shared memory."""
    return _load(tile, plgpu.Layout.WGMMA)
