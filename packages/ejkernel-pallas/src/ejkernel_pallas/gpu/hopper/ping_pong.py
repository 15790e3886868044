"""Ping-pong scheduling: named barriers that pass the tensor cores from one consumer warpgroup to the next.

    warpgroup 0    ping_pong_wait | issue products | ping_pong_pass | exponentials ...
    warpgroup 1    ............. waits ............. | ping_pong_wait | issue products | ping_pong_pass | ...

Each warpgroup has one named barrier, which it and its predecessor use (256 threads): `bar.sync` waits, `bar.arrive`
does not. Source: Shah et al. 2024, FlashAttention-3, section 3.1.
"""

from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

FIRST_PING_PONG_BARRIER_ID = 8
"""The first of the 16 named barriers that ping-pong uses: Mosaic uses 0 for the block and 1 to 4 for warpgroups."""


def ping_pong_wait(num_warpgroups: int) -> None:
    """Waits until the previous warpgroup has issued its products."""
    _named_barrier("bar.sync", 0, num_warpgroups)


def ping_pong_pass(num_warpgroups: int) -> None:
    """Lets the next warpgroup issue its products."""
    _named_barrier("bar.arrive", 1, num_warpgroups)


def _named_barrier(instruction: str, warpgroup_distance: int, num_warpgroups: int) -> None:
    """Arrives at the named barrier of the warpgroup that is `warpgroup_distance` after this one."""

    @plgpu.inline_mgpu()
    def emit_barrier(context: Any) -> None:
        del context
        i32 = ir.IntegerType.get_signless(32)
        constant = lambda value: arith.constant(i32, ir.IntegerAttr.get(i32, value))  # noqa: E731
        # Waiting and passing use the waiting warpgroup's barrier: its own to wait, its successor's to pass.
        place = arith.addi(mgpu.utils.warpgroup_idx(sync=False), constant(warpgroup_distance))
        place = arith.addi(arith.remui(place, constant(num_warpgroups)), constant(FIRST_PING_PONG_BARRIER_ID))
        llvm.inline_asm(None, [place], f"{instruction} $0, 256;", "r", has_side_effects=True)

    emit_barrier()  # pyright: ignore[reportCallIssue]  # the decorator gives the context
