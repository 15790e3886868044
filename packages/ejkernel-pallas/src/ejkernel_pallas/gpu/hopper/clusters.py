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
MEET = "barrier.cluster.arrive.release; barrier.cluster.wait.acquire;"
AWAIT = """{
.reg .pred done;
again_${:uid}:
mbarrier.try_wait.parity.shared::cta.b64 done, [$0], $1;
@!done bra again_${:uid};
}"""
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
        with mgpu.single_thread(scope=mgpu.ThreadSubset.BLOCK):
            _assembly(BEGIN, "l,r", [mgpu.utils.memref_ptr(tile_counter), _address(words)])
        _assembly(MEET, "", [])

    run(tile_counter, words)  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def end() -> None:
    """Waits until the other member needs nothing of this one any more."""

    @plgpu.inline_mgpu()
    def run(_: Any) -> None:
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
        with mgpu.single_thread(scope=mgpu.ThreadSubset.WARPGROUP):
            places = [_address(made), _address(target), _barrier(words, count.registers.item())]
            _assembly(SEND, "r,r,r,n", [*places, constant(size)])

    run(made, target, words, count)  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def await_both(words: Any, count: Any) -> None:
    """Waits for both members' gradients of a step's scores."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(())))
    def run(_: Any, words: Any, count: Any) -> None:
        number = count.registers.item()
        parity = arith.andi(arith.shrui(number, constant(1)), constant(1))
        _assembly(AWAIT, "r,r", [_barrier(words, number), parity])

    run(words, count)  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def _barrier(words: Any, count: Any) -> Any:
    place = arith.muli(arith.andi(count, constant(1)), constant(8))
    return arith.addi(arith.addi(_address(words), constant(BARRIERS)), place)


def _address(memory: Any) -> Any:
    return llvm.ptrtoint(i32(), mgpu.utils.memref_ptr(memory))


def _assembly(code: str, constraints: str, operands: list[Any]) -> None:
    constraints = f"{constraints},~{{memory}}" if constraints else "~{memory}"
    llvm.inline_asm(None, operands, code, constraints, has_side_effects=True)
