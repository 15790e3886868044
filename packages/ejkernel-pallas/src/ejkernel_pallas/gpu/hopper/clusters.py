"""How the two blocks of a cluster start together, exchange gradients of scores, and end together."""

from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir.dialects import arith, llvm

from ejkernel_pallas.gpu.hopper.launch import WGMMA_TRANSFORMS
from ejkernel_pallas.gpu.hopper.registers import int32_constant, int32_type

CLUSTER_AXIS = "member"
"""The cluster axis: a block's index in its cluster."""
MBARRIERS_OFFSET_BYTES = 16
"""Offset in bytes of the mbarriers of the exchanges, in a row of shared memory whose first word is the tile index.

There are two, for alternate steps. Mosaic's own barriers do not support copies between blocks.
"""
# Each mbarrier counts two arrivals, one per member (see SEND_SCORE_GRADIENTS_PTX). The fence makes the mbarriers
# visible to the other member before it can arrive at one. Only member 0 increments the tile counter, and writes the
# index into both members' shared memory.
START_CLUSTER_TILE_PTX = """{
.reg .pred leads; .reg .b32 rank, number, place;
mbarrier.init.shared::cta.b64 [$1 + 16], 2;
mbarrier.init.shared::cta.b64 [$1 + 24], 2;
fence.mbarrier_init.release.cluster;
mov.u32 rank, %cluster_ctarank;
setp.eq.u32 leads, rank, 0;
@leads atom.add.relaxed.gpu.global.s32 number, [$0], 1;
mapa.shared::cluster.u32 place, $1, 0;
@leads st.shared::cluster.u32 [place], number;
mapa.shared::cluster.u32 place, $1, 1;
@leads st.shared::cluster.u32 [place], number;
}"""
# Release and acquire: earlier writes of either member to shared memory are visible to both after it.
CLUSTER_BARRIER_PTX = "barrier.cluster.arrive.release; barrier.cluster.wait.acquire;"
# The hardware may end a wait early, so the wait is a loop. The label is unique per inlined copy.
WAIT_MBARRIER_PTX = """{
.reg .pred done;
again_${:uid}:
mbarrier.try_wait.parity.shared::cta.b64 done, [$0], $1;
@!done bra again_${:uid};
}"""
# The arrival at the other member's mbarrier announces the bytes of the copy, so that its phase ends when they have
# arrived. The last instruction arrives at this member's own mbarrier, whose half of the gradients is already there.
SEND_SCORE_GRADIENTS_PTX = """{
.reg .b32 rank, target, full;
mov.u32 rank, %cluster_ctarank;
xor.b32 rank, rank, 1;
mapa.shared::cluster.u32 target, $1, rank;
mapa.shared::cluster.u32 full, $2, rank;
mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64 _, [full], $3;
cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [target], [$0], $3, [full];
mbarrier.arrive.shared::cta.b64 _, [$2];
}"""


def start_cluster_tile(tile_counter: Any, tile_index_and_mbarriers: Any) -> None:
    """Fetches the index of the cluster's tile, and stores it in both members' first word.

    Args:
        tile_counter: Counter in device memory.
        tile_index_and_mbarriers: A row of int32 in shared memory: the tile index, and the mbarriers.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
    def run(_: Any, tile_counter: Any, tile_index_and_mbarriers: Any) -> None:
        # No thread of either block reads the index or uses an mbarrier before all have arrived here.
        with mgpu.single_thread(scope=mgpu.ThreadSubset.BLOCK):
            _inline_ptx(
                START_CLUSTER_TILE_PTX,
                "l,r",
                [mgpu.utils.memref_ptr(tile_counter), _shared_address(tile_index_and_mbarriers)],
            )
        _inline_ptx(CLUSTER_BARRIER_PTX, "", [])

    run(tile_counter, tile_index_and_mbarriers)  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def wait_for_cluster() -> None:
    """Waits until the other member no longer accesses this block's shared memory."""

    @plgpu.inline_mgpu()
    def run(_: Any) -> None:
        # A block that ended would release its shared memory, to which copies of the other may still be in flight.
        _inline_ptx(CLUSTER_BARRIER_PTX, "", [])

    run()  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def send_score_gradients(score_gradients: Any, target: Any, tile_index_and_mbarriers: Any, step_index: Any) -> None:
    """Sends a warpgroup's gradients of scores to the other member, and marks this member's as ready.

    Args:
        score_gradients: A step's gradients of scores in shared memory, which all threads have written and committed.
        target: The place in shared memory where the other member receives them.
        tile_index_and_mbarriers: As in `start_cluster_tile`.
        step_index: Index of the step.
    """

    @plgpu.inline_mgpu(
        arg_types=(
            plgpu.RefType(WGMMA_TRANSFORMS),
            plgpu.RefType(WGMMA_TRANSFORMS),
            plgpu.RefType(),
            plgpu.Layout.WG_SPLAT(()),
        )
    )
    def run(_: Any, score_gradients: Any, target: Any, tile_index_and_mbarriers: Any, step_index: Any) -> None:
        size = score_gradients.type.element_type.width // 8
        for dimension in score_gradients.type.shape:
            size *= dimension
        # A single thread issues a bulk copy. It reads through the async proxy, hence the commit before it.
        with mgpu.single_thread(scope=mgpu.ThreadSubset.WARPGROUP):
            local_addresses = [
                _shared_address(score_gradients),
                _shared_address(target),
                _step_mbarrier_address(tile_index_and_mbarriers, step_index.registers.item()),
            ]
            _inline_ptx(SEND_SCORE_GRADIENTS_PTX, "r,r,r,n", [*local_addresses, int32_constant(size)])

    run(score_gradients, target, tile_index_and_mbarriers, step_index)  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def wait_for_score_gradients(tile_index_and_mbarriers: Any, step_index: Any) -> None:
    """Waits for both members' gradients of a step's scores."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(())))
    def run(_: Any, tile_index_and_mbarriers: Any, step_index: Any) -> None:
        number = step_index.registers.item()
        # Each mbarrier is used in every second step, so its phase is the second bit of the step's index.
        phase_parity = arith.andi(arith.shrui(number, int32_constant(1)), int32_constant(1))
        _inline_ptx(WAIT_MBARRIER_PTX, "r,r", [_step_mbarrier_address(tile_index_and_mbarriers, number), phase_parity])

    run(tile_index_and_mbarriers, step_index)  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def _step_mbarrier_address(tile_index_and_mbarriers: Any, step_index: Any) -> Any:
    # Two mbarriers of 8 bytes alternate: a member may send a step while the other still waits for the previous one.
    offset = arith.muli(arith.andi(step_index, int32_constant(1)), int32_constant(8))
    return arith.addi(
        arith.addi(_shared_address(tile_index_and_mbarriers), int32_constant(MBARRIERS_OFFSET_BYTES)), offset
    )


def _shared_address(memory: Any) -> Any:
    return llvm.ptrtoint(int32_type(), mgpu.utils.memref_ptr(memory))


def _inline_ptx(code: str, constraints: str, operands: list[Any]) -> None:
    # The memory clobber keeps LLVM from moving loads and stores across the assembly.
    constraints = f"{constraints},~{{memory}}" if constraints else "~{memory}"
    llvm.inline_asm(None, operands, code, constraints, has_side_effects=True)
