"""Lazy rescaling of accumulators: a row maximum moves only if it has to, and only warps with a moved maximum
rescale.
"""

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf, vector

from ejkernel_pallas.gpu.hopper.layouts import ROW_LAYOUT
from ejkernel_pallas.gpu.hopper.registers import (
    float32_constant,
    int32_constant,
    int32_type,
    replace_registers,
    replace_row_values,
    unpack_pair,
    unpack_row_value,
)

ANY_BELOW_ONE_PTX = (
    "{ .reg .pred p; setp.lt.f32 p, $1, 0f3F800000; vote.sync.any.pred p, p, -1; selp.b32 $0, 1, 0, p; }"
)
"""PTX: whether a factor is below one in any thread of the warp; a vote, so that the branch is uniform."""


ANY_ABOVE_PTX = "{ .reg .pred p; setp.gt.f32 p, $1, $2; vote.sync.any.pred p, p, -1; selp.b32 $0, 1, 0, p; }"
"""PTX: whether a value is above another in any thread of the warp."""


def update_max_lazily(row_max: jax.Array, scores: jax.Array, score_factor: float, threshold: float) -> jax.Array:
    """Returns the running maximum of every row, which moves only if a score is more than `threshold` above it.

    Each thread tests its own columns; only warps with such a score exchange row maxima.

    Args:
        row_max: Float32 [64].
        scores: Float32 [64, N], N / 4 a power of two.
        score_factor: Positive factor on the scores.
        threshold: How far a score may exceed the maximum.
    """

    @plgpu.inline_mgpu(
        arg_types=(ROW_LAYOUT, plgpu.Layout.WGMMA),
        return_type=plgpu.ShapeDtypeStruct(row_max.shape, jnp.float32, layout=ROW_LAYOUT),
    )
    def update_registers(_: Any, rows: Any, tile: Any) -> Any:
        before = [unpack_row_value(register) for register in rows.registers.flat]
        # Registers alternate between a thread's two rows.
        block_maxima = [
            arith.mulf(_max_of_registers(list(tile.registers.flat)[row::2]), float32_constant(score_factor))
            for row in (0, 1)
        ]
        is_above = arith.maximumf(*[arith.subf(top, old) for top, old in zip(block_maxima, before, strict=True)])
        any_above: Any = llvm.inline_asm(
            int32_type(), [is_above, float32_constant(threshold)], ANY_ABOVE_PTX, "=r,f,f", has_side_effects=True
        )
        any_above = arith.cmpi(arith.CmpIPredicate.ne, any_above, int32_constant(0))
        rescale_branch: Any = scf.IfOp(any_above, [ir.F32Type.get()] * 2, has_else=True)
        with ir.InsertionPoint(rescale_branch.then_block):
            scf.yield_(
                [_raise_max_if_above(top, old, threshold) for top, old in zip(block_maxima, before, strict=True)]
            )
        with ir.InsertionPoint(rescale_branch.else_block):
            scf.yield_(before)
        return replace_row_values(rows, list(rescale_branch.results))

    return update_registers(row_max, scores)  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def _max_of_registers(registers: list[Any]) -> Any:
    values = [value for register in registers for value in unpack_pair(register)]
    while len(values) > 1:
        values = [arith.maximumf(x, y) for x, y in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def _raise_max_if_above(block_max: Any, running_max: Any, threshold: float) -> Any:
    # The columns of a row are in four neighbouring threads.
    for distance in (1, 2):
        block_max = arith.maximumf(block_max, mgpu.utils.shfl_bfly(block_max, distance))
    is_above = arith.cmpf(arith.CmpFPredicate.OGT, arith.subf(block_max, running_max), float32_constant(threshold))
    return arith.select(is_above, block_max, running_max)


def rescale_lazily(acc: Any, alpha: jax.Array) -> jax.Array:
    """Multiplies the accumulator by alpha, at most one, per row; warps whose alphas are all one skip it."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA, ROW_LAYOUT),
        return_type=plgpu.ShapeDtypeStruct(acc.shape, acc.dtype, layout=plgpu.Layout.WGMMA),
    )
    def scale_registers(_: Any, tile: Any, rows: Any) -> Any:
        int32_type = ir.IntegerType.get_signless(32)
        # A thread has two rows of an accumulator; it votes with the smaller factor.
        factors = [unpack_row_value(register) for register in rows.registers.flat]
        any_above: Any = llvm.inline_asm(
            int32_type, [arith.minimumf(*factors)], ANY_BELOW_ONE_PTX, "=r,f", has_side_effects=True
        )
        any_above = arith.cmpi(
            arith.CmpIPredicate.ne, any_above, arith.constant(int32_type, ir.IntegerAttr.get(int32_type, 0))
        )
        register_types = [register.type for register in tile.registers.flat]
        # The branch is uniform in a warp, so the other side costs nothing; warps share no rows, so no barrier is
        # needed.
        rescale_branch: Any = scf.IfOp(any_above, register_types, has_else=True)
        with ir.InsertionPoint(rescale_branch.then_block):
            # Registers alternate between a thread's two rows, and hold two neighbouring columns of one.
            pairs = [vector.broadcast(register_types[0], factor) for factor in factors]
            scf.yield_([arith.mulf(register, pairs[n % 2]) for n, register in enumerate(tile.registers.flat)])
        with ir.InsertionPoint(rescale_branch.else_block):
            scf.yield_(list(tile.registers.flat))
        return replace_registers(tile, list(rescale_branch.results))

    return scale_registers(acc, alpha)  # pyright: ignore[reportCallIssue]  # the decorator gives the context
