"""Counts what thread blocks have stored, so that the last one to arrive can read all of it.

block 0    stores | fence | counter += 3 -> 0 ....................... not the last one: goes on
block 1    stores ...... | fence | counter += 2 -> 3 | fence | loads    3 + 2 is all: it reads the stores of both
"""

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from ejkernel_pallas.gpu.hopper.registers import int32_constant, int32_type
from ejkernel_pallas.gpu.hopper.sizes import THREADS_PER_WARPGROUP

_UNIFORM_INT32 = plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT(()))
FENCE_PTX = "fence.acq_rel.gpu;"
# One thread adds for all: the barrier before makes the stores of its warpgroup precede the addition, by cumulativity.
ADD_AND_SHARE_PTX = """{
.reg .pred leads;
.reg .b32 before;
setp.eq.u32 leads, $3, 0;
@leads atom.add.acq_rel.gpu.global.u32 before, [$0], $1;
@leads st.shared.b32 [$2], before;
}"""


def add_arrivals(counter: Any, count: Any, slot: Any) -> jax.Array:
    """Adds to a counter after all stores of the warpgroup, and returns its value before, int32. Loads that follow see
    what the warpgroups stored that have added before.

    Args:
        counter: Reference to a semaphore in device memory, 0 when the kernel starts.
        count: What is added, int32.
        slot: Reference to int32 [1] in shared memory, by which the threads share the value.
    """

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(()), plgpu.RefType()), return_type=_UNIFORM_INT32
    )
    def add(_: Any, counter: Any, count: Any, slot: Any) -> Any:
        thread = arith.remui(mgpu.utils.thread_idx(), int32_constant(THREADS_PER_WARPGROUP))
        address = llvm.ptrtoint(int32_type(), mgpu.utils.memref_ptr(slot))
        operands = [mgpu.utils.memref_ptr(counter), count.registers.item(), address, thread]
        _inline(FENCE_PTX, "", [])
        mgpu.utils.warpgroup_barrier()
        _inline(ADD_AND_SHARE_PTX, "l,r,r,r", operands)
        mgpu.utils.warpgroup_barrier()
        before: Any = llvm.inline_asm(
            int32_type(), [address], "ld.shared.b32 $0, [$1];", "=r,r,~{memory}", has_side_effects=True
        )
        # All have read the slot before the next addition writes it.
        mgpu.utils.warpgroup_barrier()
        _inline(FENCE_PTX, "", [])
        return mgpu.FragmentedArray.splat(before, (), is_signed=True)

    return add(counter, count, slot)  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def _inline(code: str, constraints: str, operands: list[Any]) -> None:
    llvm.inline_asm(
        ir.Type.parse("!llvm.void"), operands, code, f"{constraints},~{{memory}}".lstrip(","), has_side_effects=True
    )
