"""How the warpgroups of a block take turns at the tensor cores."""

from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

FIRST = 8
"""First of the hardware's 16 named barriers that turns use: Mosaic has 0 for the block and 1 to 4 for warpgroups."""


def await_turn(warpgroups: int) -> None:
    """Waits until the warpgroup before this one has passed its turn on."""
    _named_barrier("bar.sync", 0, warpgroups)


def pass_turn(warpgroups: int) -> None:
    """Lets the next warpgroup have its turn."""
    _named_barrier("bar.arrive", 1, warpgroups)


def _named_barrier(instruction: str, ahead: int, warpgroups: int) -> None:
    """Meets, at the barrier of the warpgroup `ahead` of this one in the round, the other warpgroup that uses it."""

    @plgpu.inline_mgpu()
    def meet(context: Any) -> None:
        del context
        i32 = ir.IntegerType.get_signless(32)
        constant = lambda value: arith.constant(i32, ir.IntegerAttr.get(i32, value))  # noqa: E731
        place = arith.addi(mgpu.utils.warpgroup_idx(sync=False), constant(ahead))
        place = arith.addi(arith.remui(place, constant(warpgroups)), constant(FIRST))
        llvm.inline_asm(None, [place], f"{instruction} $0, 256;", "r", has_side_effects=True)

    meet()  # pyright: ignore[reportCallIssue]  # the decorator gives the context
