"""Products of queries with keys in registers that nobody makes zero: the first instruction leaves out what is there.

Mosaic's own adds to an array. Zeros for it are 32 instructions a visit with 128 keys, before any product is under way.
Source of descriptors and instructions: PTX ISA, asynchronous warpgroup-level matrix instructions.
"""

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from ejkernel_pallas.gpu.hopper.launch import TRANSFORMS
from ejkernel_pallas.gpu.hopper.registers import constant, i32, number, pair, with_registers
from ejkernel_pallas.gpu.hopper.sizes import PART, ROWS, THREADS

STEP = 16
"""Columns of queries and keys that one instruction multiplies."""
UNIT = 16
"""Bytes that the numbers of a descriptor count. Eight rows of a part take as many of them as it has columns: 64."""
SWIZZLED = 1 << 30
"""In the upper word of a descriptor: rows of 128 bytes, swizzled. Below it is how far eight rows lie apart."""
KINDS = {"bfloat16": "bf16", "float16": "f16"}


def begin(queries: Any, keys: Any, *more: tuple[Any, Any]) -> jax.Array:
    """Issues a product, and gives the registers that it is summed up in, which nothing but `finish` may read.

    Args:
        queries: Reference to bfloat16 or float16 [64, D] in shared memory.
        keys: Likewise, [keys, D].
        more: Pairs of both with other columns, whose products are added.

    Returns:
        Float32 [64, keys], not there yet.
    """
    refs = [queries, keys, *(ref for both in more for ref in both)]
    shape, sizes = (ROWS, keys.shape[0]), [ref.shape[1] for ref in refs[::2]]
    code = _code(keys.shape[0], sizes, KINDS[jnp.dtype(keys.dtype).name])

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(TRANSFORMS),) * len(refs),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=plgpu.Layout.WGMMA),
    )
    def issue(_: Any, *refs: Any) -> Any:
        places = [arith.divui(llvm.ptrtoint(i32(), mgpu.utils.memref_ptr(ref)), constant(UNIT)) for ref in refs]
        like = mgpu.FragmentedArray.splat(number(0.0), shape, layout=mgpu.WGMMA_LAYOUT, is_signed=None)
        return _assembled(like, code, ["=f"] * _registers(shape) + ["r"] * len(refs), places)

    return issue(*refs)  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def finish(scores: jax.Array, *, under_way: int) -> jax.Array:
    """The scores that `begin` was to make, once no more than some later products are under way.

    All registers go through the instruction that waits, so that nothing reads them before it.
    """

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA,),
        return_type=plgpu.ShapeDtypeStruct(scores.shape, jnp.float32, layout=plgpu.Layout.WGMMA),
    )
    def wait(_: Any, scores: Any) -> Any:
        given = [score for register in scores.registers.flat for score in pair(register)]
        tied = ["=f"] * len(given) + [str(n) for n in range(len(given))]
        return _assembled(scores, f"wgmma.wait_group.sync.aligned {under_way};", tied, given)

    return wait(scores)  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def _registers(shape: tuple[int, int]) -> int:
    """Of a thread of a warpgroup."""
    return shape[0] * shape[1] // THREADS


def _assembled(like: Any, code: str, constraints: list[str], operands: list[Any]) -> Any:
    """An array of another one's layout, of the numbers that assembly makes."""
    f32, count = ir.F32Type.get(), _registers(like.shape)
    struct = llvm.StructType.get_literal([f32] * count)
    made: Any = llvm.inline_asm(struct, operands, code, ",".join(constraints), has_side_effects=True)
    numbers = [llvm.extractvalue(f32, made, [n]) for n in range(count)]
    halves = zip(like.registers.flat, numbers[::2], numbers[1::2], strict=True)
    return with_registers(like, [vector.from_elements(register.type, both) for register, *both in halves])


def _code(keys: int, sizes: list[int], kind: str) -> str:
    """PTX of a product: an instruction for every 16 columns, of which only the first adds to nothing."""
    count = _registers((ROWS, keys))
    sums, instruction = ", ".join(f"${n}" for n in range(count)), f"wgmma.mma_async.sync.aligned.m{ROWS}n{keys}k{STEP}"
    lines = ["{ .reg .pred adds; .reg .b32 zero, upper, place; .reg .b64 left, right;"]
    lines += ["mov.b32 zero, 0; wgmma.fence.sync.aligned;"]
    for pair_number, size in enumerate(sizes):
        first = count + 2 * pair_number
        lines += [f"mov.b32 upper, {SWIZZLED | size};"]
        for column in range(0, size, STEP):
            part, rest = divmod(column, PART)
            units = part * PART + rest * 2 // UNIT
            lines += [f"add.u32 place, ${first}, {units}; mov.b64 left, {{place, upper}};"]
            lines += [f"add.u32 place, ${first + 1}, {units}; mov.b64 right, {{place, upper}};"]
            lines += [f"setp.ne.b32 adds, zero, {column + pair_number};"]
            lines += [f"{instruction}.f32.{kind}.{kind} {{{sums}}}, left, right, adds, 1, 1, 0, 0;"]
    return "\n".join([*lines, "wgmma.commit_group.sync.aligned; }"])
