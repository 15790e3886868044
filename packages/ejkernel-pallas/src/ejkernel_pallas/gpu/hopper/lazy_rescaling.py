"""Lazy rescaling of accumulators: only in warps where some row's maximum moved."""

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf, vector

from ejkernel_pallas.gpu.hopper.layouts import ROW_LAYOUT
from ejkernel_pallas.gpu.hopper.registers import scalar, with_registers

ANY = "{ .reg .pred p; setp.lt.f32 p, $1, 0f3F800000; vote.sync.any.pred p, p, -1; selp.b32 $0, 1, 0, p; }"
"""PTX: whether a factor is below one in some thread of the warp; a vote, so that all threads take one branch."""


def rescale_lazily(acc: Any, alpha: jax.Array) -> jax.Array:
    """The accumulator times alpha, at most one, for every row; warps whose alphas are all one leave it as it is."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA, ROW_LAYOUT),
        return_type=plgpu.ShapeDtypeStruct(acc.shape, acc.dtype, layout=plgpu.Layout.WGMMA),
    )
    def scale(_: Any, tile: Any, rows: Any) -> Any:
        i32 = ir.IntegerType.get_signless(32)
        # A thread holds two rows of an accumulator; its vote is about the smaller factor.
        factors = [scalar(register) for register in rows.registers.flat]
        some: Any = llvm.inline_asm(i32, [arith.minimumf(*factors)], ANY, "=r,f", has_side_effects=True)
        some = arith.cmpi(arith.CmpIPredicate.ne, some, arith.constant(i32, ir.IntegerAttr.get(i32, 0)))
        types = [register.type for register in tile.registers.flat]
        # All threads of a warp take one side, so the other costs nothing; no barrier is needed, as warps share no row.
        branch: Any = scf.IfOp(some, types, has_else=True)
        with ir.InsertionPoint(branch.then_block):
            # Registers alternate between a thread's two rows, and hold two neighbouring columns of one.
            pairs = [vector.broadcast(types[0], factor) for factor in factors]
            scf.yield_([arith.mulf(register, pairs[n % 2]) for n, register in enumerate(tile.registers.flat)])
        with ir.InsertionPoint(branch.else_block):
            scf.yield_(list(tile.registers.flat))
        return with_registers(tile, list(branch.results))

    return scale(acc, alpha)  # pyright: ignore[reportCallIssue]  # the decorator gives the context
