"""WGMMA for S = Q K^T without zeroing the accumulator: the first instruction has scale-d = 0 and ignores its content.

    issue:       fence │ wgmma k=0 (scale-d 0) │ wgmma k=16 (scale-d 1) │ ... │ commit_group ─► asynchronous
    accumulate:  fence │ wgmma k=0 (scale-d 1) │ wgmma k=16 (scale-d 1) │ ... │ commit_group ─► asynchronous
    wait:        wait_group in_flight ─► registers valid

Mosaic's own WGMMA accumulates into an array, whose zeros cost 32 instructions for 128 keys before any product can
start. `accumulate` is for O = O + P V with values in chunks of 64 columns, each copied separately:

    values [C, keys, 64]    chunk 0: all keys, columns 0 to 63 │ chunk 1: all keys, columns 64 to 127 │ ...

A chunk is also a tile of keys for S, so that products start when the first chunk has arrived.
Source of descriptors and instructions: PTX ISA, asynchronous warpgroup-level matrix instructions.
"""

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from ejkernel_pallas.gpu.hopper.launch import transforms
from ejkernel_pallas.gpu.hopper.registers import constant, i32, number, pair, scalar, with_registers
from ejkernel_pallas.gpu.hopper.sizes import THREADS, WGMMA_M

STEP = 32
"""Bytes of a row per WGMMA instruction: 16 columns of 16 bits, 32 of 8."""
LINE = 128
"""Bytes of a swizzled row."""
UNIT = 16
"""Bytes per unit of a matrix descriptor. Eight swizzled rows are 64 such units."""
SWIZZLED = 1 << 30
"""Upper word of a matrix descriptor: the 128-byte swizzle. Its low bits hold the stride of eight rows."""
KINDS = {"bfloat16": "bf16", "float16": "f16", "float8_e4m3fn": "e4m3"}
BYTES = {"bf16": 2, "f16": 2, "e4m3": 1}
"""Bytes per element of an operand."""


def issue(queries: Any, keys: Any, *pairs: tuple[Any, Any]) -> jax.Array:
    """Issues a product; returns its accumulator registers, which must not be read before `wait`.

    Args:
        queries: Reference to bfloat16, float16 or float8_e4m3fn [64, D] in shared memory.
        keys: Reference to the same dtype, [keys, D].
        pairs: References to further columns of both.

    Returns:
        Float32 [64, keys], not valid until `wait`.
    """
    return _issued(None, [queries, keys, *(ref for both in pairs for ref in both)])


def extend(scores: jax.Array, *pairs: tuple[Any, Any]) -> jax.Array:
    """Issues products over further columns, which are added to those of `issue`.

    Args:
        scores: Accumulator registers of `issue`.
        pairs: References to queries and keys, as there.

    Returns:
        The same registers, not valid until `wait`.
    """
    return _issued(scores, [ref for both in pairs for ref in both])


def _issued(scores: jax.Array | None, refs: list[Any]) -> jax.Array:
    """Issues a product for every pair of references, into new registers or those of `scores`."""
    shape, sizes = (WGMMA_M, refs[1].shape[0]), [ref.shape[1] for ref in refs[::2]]
    count, kind = _registers(shape), KINDS[jnp.dtype(refs[1].dtype).name]
    given = [] if scores is None else [scores]
    code = _code(shape[1], sizes, kind, count * (1 + len(given)), fresh=scores is None)
    # Operands are tied to results: the same registers hold the sums before and after, without copies.
    tied = [str(n) for n in range(count)] * len(given)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA,) * len(given) + (plgpu.RefType(transforms(itemsize=BYTES[kind])),) * len(refs),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=plgpu.Layout.WGMMA),
    )
    def run(_: Any, *operands: Any) -> Any:
        sums, refs = operands[: len(given)], operands[len(given) :]
        # The low word of a descriptor is the address, in its units. The upper word is the same for all threads and
        # columns.
        places = [_place(ref) for ref in refs]
        like = mgpu.FragmentedArray.splat(number(0.0), shape, layout=mgpu.WGMMA_LAYOUT, is_signed=None)
        before = [score for tile in sums for register in tile.registers.flat for score in pair(register)]
        return _assembled(like, code, ["=f"] * count + tied + ["r"] * len(refs), [*before, *places])

    return run(*given, *refs)  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def extend_from_registers(scores: jax.Array, queries: jax.Array, keys: Any) -> jax.Array:
    """Issues a product with queries in registers, which saves shared memory bandwidth, added to previous products.

    Args:
        scores: Accumulator registers of `issue`.
        queries: 16-bit elements [64, 64] in an accumulator's layout; they must not change before `wait`.
        keys: Reference to [keys, 64] of the same dtype.

    Returns:
        The registers of `scores`, not valid until `wait`.
    """
    return _accumulated(scores, queries, keys, [step * STEP // UNIT for step in range(LINE // STEP)], transposed=False)


def accumulate(acc: jax.Array, weights: Any, values: Any) -> jax.Array:
    """Issues weights times values, added to an accumulator; returns its registers, which must not be read before
    `wait`.

    Args:
        acc: Float32 [64, C * 64].
        weights: 16-bit elements [64, keys], in an accumulator's layout or a reference to shared memory; at most 64
            keys.
        values: Reference to [C, keys, 64] of the same dtype, or to the first of C consecutive chunks.
    """
    keys = values.shape[-2]
    # A descriptor's low word has the stride of chunks, its upper word the stride of eight keys.
    chunk = (keys * LINE // UNIT) << 16
    offsets = [chunk + key * LINE // UNIT for key in range(0, keys, STEP // 2)]
    return _accumulated(acc, weights, values, offsets, transposed=True)


def _accumulated(acc: jax.Array, a: Any, b: Any, offsets: list[int], *, transposed: bool) -> jax.Array:
    """Issues one instruction per offset, which is added to the low word of B's descriptor."""
    shape, kind, in_registers = (WGMMA_M, acc.shape[1]), KINDS[jnp.dtype(b.dtype).name], isinstance(a, jax.Array)
    count, ref = _registers(shape), plgpu.RefType(transforms())
    code = _accumulating_code(shape[1], kind, offsets, transposed=transposed, in_registers=in_registers)
    tied = [str(n) for n in range(count)]

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA, plgpu.Layout.WGMMA if in_registers else ref, ref),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=plgpu.Layout.WGMMA),
    )
    def run(_: Any, acc: Any, a: Any, b: Any) -> Any:
        before = [value for register in acc.registers.flat for value in pair(register)]
        word = ir.VectorType.get((1,), i32())
        given = [scalar(vector.bitcast(word, x)) for x in a.registers.flat] if in_registers else [_place(a)]
        inputs = tied + ["r"] * (len(given) + 1)
        return _assembled(acc, code, ["=f"] * count + inputs, [*before, *given, _place(b)])

    return run(acc, a, b)  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def fence_writes() -> None:
    """Makes a thread's writes to shared memory visible to products of warpgroups that learn of them by an mbarrier.

    All threads that wrote must arrive at that mbarrier after this.
    """

    @plgpu.inline_mgpu()
    def run(_: Any) -> None:
        llvm.inline_asm(None, [], "fence.proxy.async.shared::cta;", "~{memory}", has_side_effects=True)

    run()  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def wait(scores: jax.Array, *, in_flight: int) -> jax.Array:
    """Returns an accumulator once at most `in_flight` later groups of products are unfinished.

    Hazard: all registers are operands of the waiting instruction, so the compiler cannot move a read before it.
    """

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA,),
        return_type=plgpu.ShapeDtypeStruct(scores.shape, jnp.float32, layout=plgpu.Layout.WGMMA),
    )
    def run(_: Any, scores: Any) -> Any:
        given = [score for register in scores.registers.flat for score in pair(register)]
        # Every register is an input and an output of the wait.
        tied = ["=f"] * len(given) + [str(n) for n in range(len(given))]
        return _assembled(scores, f"wgmma.wait_group.sync.aligned {in_flight};", tied, given)

    return run(scores)  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def _place(ref: Any) -> Any:
    """Returns the shared memory address in units of a descriptor."""
    return arith.divui(llvm.ptrtoint(i32(), mgpu.utils.memref_ptr(ref)), constant(UNIT))


def _registers(shape: tuple[int, int]) -> int:
    """Returns the accumulator registers per thread."""
    return shape[0] * shape[1] // THREADS


def _assembled(like: Any, code: str, constraints: list[str], operands: list[Any]) -> Any:
    """Returns an array with the layout of `like`, from the results of inline assembly."""
    f32, count = ir.F32Type.get(), _registers(like.shape)
    struct = llvm.StructType.get_literal([f32] * count)
    made: Any = llvm.inline_asm(struct, operands, code, ",".join(constraints), has_side_effects=True)
    numbers = [llvm.extractvalue(f32, made, [n]) for n in range(count)]
    halves = zip(like.registers.flat, numbers[::2], numbers[1::2], strict=True)
    return with_registers(like, [vector.from_elements(register.type, both) for register, *both in halves])


def _code(keys: int, sizes: list[int], kind: str, first: int, *, fresh: bool) -> str:
    """Returns the PTX of products, one instruction per 32 bytes of a row; the scale-d is false for the first if
    `fresh`.

    Args:
        keys: N of the accumulator.
        sizes: Columns of every pair of operands.
        kind: PTX type of the operands.
        first: Index of the first operand's address among the assembly's operands.
        fresh: Whether the accumulator is uninitialised.
    """
    sums = ", ".join(f"${n}" for n in range(_registers((WGMMA_M, keys))))
    size_of = BYTES[kind]
    instruction = f"wgmma.mma_async.sync.aligned.m{WGMMA_M}n{keys}k{STEP // size_of}"
    # Operands of 16 bits have a transposition flag; those of 8 bits cannot be transposed.
    orders = ", 0, 0" if size_of == 2 else ""
    # scale-d is a predicate. Comparing with a register sets it by an instruction, which cannot be folded away.
    lines = ["{ .reg .pred adds; .reg .b32 zero, upper, place; .reg .b64 left, right;"]
    # The fence orders earlier accesses of these registers before the first product, which is asynchronous.
    lines += [f"mov.b32 zero, 0; mov.b32 upper, {SWIZZLED | sizes[0] * size_of // 2}; wgmma.fence.sync.aligned;"]
    for pair_number, size in enumerate(sizes):
        place = first + 2 * pair_number
        lines += [f"mov.b32 upper, {SWIZZLED | size * size_of // 2};"] * (pair_number > 0)
        for column in range(0, size, STEP // size_of):
            # Atoms of the same eight rows are consecutive, 8 x 128 bytes apart; within one, the hardware applies the
            # swizzle to addresses, so columns advance as if there were none.
            part, rest = divmod(column * size_of, LINE)
            units = (part * 8 * LINE + rest) // UNIT
            lines += [f"add.u32 place, ${place}, {units}; mov.b64 left, {{place, upper}};"]
            lines += [f"add.u32 place, ${place + 1}, {units}; mov.b64 right, {{place, upper}};"]
            # False only for the first product of a fresh accumulator, whose content is then ignored.
            lines += [f"setp.ne.b32 adds, zero, {column + pair_number + (not fresh)};"]
            lines += [f"{instruction}.f32.{kind}.{kind} {{{sums}}}, left, right, adds, 1, 1{orders};"]
    return "\n".join([*lines, "wgmma.commit_group.sync.aligned; }"])


def _accumulating_code(columns: int, kind: str, offsets: list[int], *, transposed: bool, in_registers: bool) -> str:
    """Returns the PTX of `_accumulated`. The assembly's operands are the results, then the previous sums, A, and B.

    Args:
        columns: N of the accumulator.
        kind: PTX type of A and B.
        offsets: Offset of each instruction from B's address.
        transposed: Whether the columns of B are contiguous instead of its rows.
        in_registers: Whether A is four registers per instruction, or one address.
    """
    count = _registers((WGMMA_M, columns))
    first, sums = 2 * count, ", ".join(f"${n}" for n in range(count))
    place = first + (4 * len(offsets) if in_registers else 1)
    instruction = f"wgmma.mma_async.sync.aligned.m{WGMMA_M}n{columns}k{STEP // 2}.f32.{kind}.{kind} {{{sums}}}"
    lines = ["{ .reg .pred adds; .reg .b32 place, upper; .reg .b64 left, right; setp.ne.b32 adds, 1, 0;"]
    # Eight rows of 128 bytes are contiguous, in A and in B.
    lines += [f"mov.b32 upper, {SWIZZLED | 8 * LINE // UNIT}; wgmma.fence.sync.aligned;"]
    for number_of, offset in enumerate(offsets):
        lines += [f"add.u32 place, ${place}, {offset}; mov.b64 right, {{place, upper}};"]
        if in_registers:
            a = ", ".join(f"${first + 4 * number_of + n}" for n in range(4))
            lines += [f"{instruction}, {{{a}}}, right, adds, 1, 1, {int(transposed)};"]
        else:
            lines += [f"add.u32 place, ${first}, {number_of * STEP // UNIT}; mov.b64 left, {{place, upper}};"]
            lines += [f"{instruction}, left, right, adds, 1, 1, 0, {int(transposed)};"]
    return "\n".join([*lines, "wgmma.commit_group.sync.aligned; }"])
