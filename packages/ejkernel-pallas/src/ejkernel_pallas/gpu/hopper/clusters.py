"""How the two blocks of a pair, a cluster, begin together, exchange gradients of scores, and end together."""

from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir.dialects import arith, llvm

from ejkernel_pallas.gpu.hopper.launch import TRANSFORMS
from ejkernel_pallas.gpu.hopper.registers import constant, i32

AXIS = "member"
"""Name of a block's place in its cluster."""
BARRIERS = 16
"""Bytes before the barriers at which exchanges are awaited, in a row of shared memory whose first word is a number.

There is one for each of two steps. A copy from block to block takes no barrier of Mosaic's.
"""
# Each barrier counts two arrivals, one of each member (see SEND). The fence makes the barriers visible to the other
# member before it can arrive at one.
# Member 0 alone counts tiles, and writes the number into both members' shared memory.
BEGIN = """{
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
# Release and acquire: what a member wrote into either's shared memory before is visible to both behind it.
MEET = "barrier.cluster.arrive.release; barrier.cluster.wait.acquire;"
# The hardware ends a wait after a time of its own, so the wait is a loop. Labels differ by inlined copy.
AWAIT = """{
.reg .pred done;
again_${:uid}:
mbarrier.try_wait.parity.shared::cta.b64 done, [$0], $1;
@!done bra again_${:uid};
}"""
# The arrival at the other's barrier announces the bytes of the copy, so that its phase ends when they are there.
# The last instruction arrives at this member's own barrier: its half of the gradients is in place already.
SEND = """{
.reg .b32 rank, target, full;
mov.u32 rank, %cluster_ctarank;
xor.b32 rank, rank, 1;
mapa.shared::cluster.u32 target, $1, rank;
mapa.shared::cluster.u32 full, $2, rank;
mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64 _, [full], $3;
cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [target], [$0], $3, [full];
mbarrier.arrive.shared::cta.b64 _, [$2];
}"""


def begin(tile_counter: Any, words: Any) -> None:
    """Takes the number of the pair's tile, and leaves it in both members' first word.

    Args:
        tile_counter: Counter in device memory.
        words: A row of int32 in shared memory: the number, and the barriers.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
    def run(_: Any, tile_counter: Any, words: Any) -> None:
        # No thread of either block reads the number or touches a barrier before all have met.
        with mgpu.single_thread(scope=mgpu.ThreadSubset.BLOCK):
            _assembly(BEGIN, "l,r", [mgpu.utils.memref_ptr(tile_counter), _address(words)])
        _assembly(MEET, "", [])

    run(tile_counter, words)  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def end() -> None:
    """Waits until the other member needs nothing of this one any more."""

    @plgpu.inline_mgpu()
    def run(_: Any) -> None:
        # A block that ends gives its shared memory back, to which the other's copies may still be on their way.
        _assembly(MEET, "", [])

    run()  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def send(made: Any, target: Any, words: Any, count: Any) -> None:
    """A warpgroup's gradients of scores go to the other member, and are ready for this one.

    Args:
        made: A step's gradients of scores in shared memory, which all threads have written and committed.
        target: Where the other member has them.
        words: As in `begin`.
        count: Number of the step.
    """

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(TRANSFORMS), plgpu.RefType(TRANSFORMS), plgpu.RefType(), plgpu.Layout.WG_SPLAT(()))
    )
    def run(_: Any, made: Any, target: Any, words: Any, count: Any) -> None:
        size = made.type.element_type.width // 8
        for length in made.type.shape:
            size *= length
        # A bulk copy is one instruction of one thread. It reads through the async proxy, hence the commit before.
        with mgpu.single_thread(scope=mgpu.ThreadSubset.WARPGROUP):
            places = [_address(made), _address(target), _barrier(words, count.registers.item())]
            _assembly(SEND, "r,r,r,n", [*places, constant(size)])

    run(made, target, words, count)  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def await_both(words: Any, count: Any) -> None:
    """Waits for both members' gradients of a step's scores."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(())))
    def run(_: Any, words: Any, count: Any) -> None:
        number = count.registers.item()
        # A barrier serves every second step, so its phase is the second bit of the step's number.
        parity = arith.andi(arith.shrui(number, constant(1)), constant(1))
        _assembly(AWAIT, "r,r", [_barrier(words, number), parity])

    run(words, count)  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def _barrier(words: Any, count: Any) -> Any:
    # Two barriers alternate, 8 bytes each: a member may send a step while the other still waits for the last.
    place = arith.muli(arith.andi(count, constant(1)), constant(8))
    return arith.addi(arith.addi(_address(words), constant(BARRIERS)), place)


def _address(memory: Any) -> Any:
    return llvm.ptrtoint(i32(), mgpu.utils.memref_ptr(memory))


def _assembly(code: str, constraints: str, operands: list[Any]) -> None:
    # The memory clobber keeps LLVM from moving loads and stores across it.
    constraints = f"{constraints},~{{memory}}" if constraints else "~{memory}"
    llvm.inline_asm(None, operands, code, constraints, has_side_effects=True)
