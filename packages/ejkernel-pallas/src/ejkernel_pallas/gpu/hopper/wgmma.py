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


def begin(queries: Any, keys: Any) -> jax.Array:
    """Issues a product, and gives the registers that it is summed up in, which nothing but `finish` may read.

    Args:
        queries: Reference to bfloat16 or float16 [64, D] in shared memory.
        keys: Likewise, [keys, D].

    Returns:
        Float32 [64, keys], not there yet.
    """
    return _issue(None, [queries, keys])


def extend(scores: jax.Array, *pairs: tuple[Any, Any]) -> jax.Array:
    """Issues products with other columns that are added to what `begin` issued.

    Args:
        scores: What `begin` gave.
        pairs: References to queries and keys, as there.

    Returns:
        The same registers, not there yet.
    """
    return _issue(scores, [ref for both in pairs for ref in both])


def _issue(scores: jax.Array | None, refs: list[Any]) -> jax.Array:
    shape, sizes = (ROWS, refs[1].shape[0]), [ref.shape[1] for ref in refs[::2]]
    count, kind = _registers(shape), KINDS[jnp.dtype(refs[1].dtype).name]
    given = [] if scores is None else [scores]
    first = count * (1 + len(given))
    code = _code(shape[1], sizes, kind, first, fresh=scores is None)
    tied = [str(n) for n in range(count)] * len(given)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA,) * len(given) + (plgpu.RefType(TRANSFORMS),) * len(refs),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=plgpu.Layout.WGMMA),
    )
    def issue(_: Any, *given_and_refs: Any) -> Any:
        sums, places = given_and_refs[: len(given)], given_and_refs[len(given) :]
        places = [arith.divui(llvm.ptrtoint(i32(), mgpu.utils.memref_ptr(ref)), constant(UNIT)) for ref in places]
        like = mgpu.FragmentedArray.splat(number(0.0), shape, layout=mgpu.WGMMA_LAYOUT, is_signed=None)
        before = [score for tile in sums for register in tile.registers.flat for score in pair(register)]
        return _assembled(like, code, ["=f"] * count + tied + ["r"] * len(refs), [*before, *places])

    return issue(*given, *refs)  # pyright: ignore[reportCallIssue]  # the decorator gives the context


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


def _code(keys: int, sizes: list[int], kind: str, first: int, *, fresh: bool) -> str:
    """PTX of products: an instruction for every 16 columns, of which only the first adds to nothing, if `fresh`.

    Args:
        keys: Columns of the result.
        sizes: Columns of each pair of operands.
        kind: Of numbers.
        first: Number of the first operand's place among those of the assembly.
        fresh: Whether there is nothing to add to.
    """
    sums = ", ".join(f"${n}" for n in range(_registers((ROWS, keys))))
    instruction = f"wgmma.mma_async.sync.aligned.m{ROWS}n{keys}k{STEP}"
    lines = ["{ .reg .pred adds; .reg .b32 zero, upper, place; .reg .b64 left, right;"]
    lines += ["mov.b32 zero, 0; wgmma.fence.sync.aligned;"]
    for pair_number, size in enumerate(sizes):
        place = first + 2 * pair_number
        lines += [f"mov.b32 upper, {SWIZZLED | size};"]
        for column in range(0, size, STEP):
            part, rest = divmod(column, PART)
            units = part * PART + rest * 2 // UNIT
            lines += [f"add.u32 place, ${place}, {units}; mov.b64 left, {{place, upper}};"]
            lines += [f"add.u32 place, ${place + 1}, {units}; mov.b64 right, {{place, upper}};"]
            lines += [f"setp.ne.b32 adds, zero, {column + pair_number + (not fresh)};"]
            lines += [f"{instruction}.f32.{kind}.{kind} {{{sums}}}, left, right, adds, 1, 1, 0, 0;"]
    return "\n".join([*lines, "wgmma.commit_group.sync.aligned; }"])
