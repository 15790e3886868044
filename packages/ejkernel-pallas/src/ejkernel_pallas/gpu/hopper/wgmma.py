"""WGMMA for S = Q K^T without zeroing the accumulator: the first instruction has scale-d = 0 and ignores its content.

    issue:       fence │ wgmma k=0 (scale-d 0) │ wgmma k=16 (scale-d 1) │ ... │ commit_group ─► asynchronous
    accumulate_product:  fence │ wgmma k=0 (scale-d 1) │ wgmma k=16 (scale-d 1) │ ... │ commit_group ─► asynchronous
    wait:        wait_group max_in_flight ─► registers valid

Mosaic's own WGMMA accumulates into an array, whose zeros cost 32 instructions for 128 keys before any product can
start. `accumulate_product` is for O = O + P V with values in chunks of 64 columns, each copied separately:

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

from ejkernel_pallas.gpu.hopper.launch import wgmma_transforms
from ejkernel_pallas.gpu.hopper.registers import (
    float32_constant,
    int32_constant,
    int32_type,
    replace_registers,
    unpack_pair,
    unpack_row_value,
)
from ejkernel_pallas.gpu.hopper.sizes import THREADS_PER_WARPGROUP, WGMMA_M

ROW_BYTES_PER_INSTRUCTION = 32
"""Bytes of a row per WGMMA instruction: 16 columns of 16 bits, 32 of 8."""
SWIZZLED_ROW_BYTES = 128
"""Bytes of a swizzled row."""
DESCRIPTOR_UNIT_BYTES = 16
"""Bytes per unit of a matrix descriptor. Eight swizzled rows are 64 such units."""
SWIZZLE_128B = 1 << 30
"""Upper word of a matrix descriptor: the 128-byte swizzle. Its low bits hold the stride of eight rows."""
PTX_TYPES = {"bfloat16": "bf16", "float16": "f16", "float8_e4m3fn": "e4m3"}
ELEMENT_BYTES_BY_PTX_TYPE = {"bf16": 2, "f16": 2, "e4m3": 1}
"""Bytes per element of an operand."""


def issue_scores(queries: Any, keys: Any, *further_operand_pairs: tuple[Any, Any]) -> jax.Array:
    """Issues a product; returns its accumulator registers, which must not be read before `wait_for_products`.

    Args:
        queries: Reference to bfloat16, float16 or float8_e4m3fn [64, D] in shared memory.
        keys: Reference to the same dtype, [keys, D].
        further_operand_pairs: References to further columns of both.

    Returns:
        Float32 [64, keys], not valid until `wait_for_products`.
    """
    return _issue_products(None, [queries, keys, *(ref for pair in further_operand_pairs for ref in pair)])


def add_to_scores(scores: jax.Array, *further_operand_pairs: tuple[Any, Any]) -> jax.Array:
    """Issues products over further columns, which are added to those of `issue_scores`.

    Args:
        scores: Accumulator registers of `issue_scores`.
        further_operand_pairs: References to queries and keys, as there.

    Returns:
        The same registers, not valid until `wait_for_products`.
    """
    return _issue_products(scores, [ref for pair in further_operand_pairs for ref in pair])


def _issue_products(scores: jax.Array | None, refs: list[Any]) -> jax.Array:
    """Issues a product for every pair of references, into new registers or those of `scores`."""
    shape, sizes = (WGMMA_M, refs[1].shape[0]), [ref.shape[1] for ref in refs[::2]]
    count, kind = _registers_per_thread(shape), PTX_TYPES[jnp.dtype(refs[1].dtype).name]
    accumulators = [] if scores is None else [scores]
    code = _product_ptx(shape[1], sizes, kind, count * (1 + len(accumulators)), zero_accumulator=scores is None)
    # Operands are tied to results: the same registers hold the sums before and after, without copies.
    tied_constraints = [str(n) for n in range(count)] * len(accumulators)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA,) * len(accumulators)
        + (plgpu.RefType(wgmma_transforms(itemsize=ELEMENT_BYTES_BY_PTX_TYPE[kind])),) * len(refs),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=plgpu.Layout.WGMMA),
    )
    def run(_: Any, *operands: Any) -> Any:
        sums, refs = operands[: len(accumulators)], operands[len(accumulators) :]
        # The low word of a descriptor is the address, in its units. The upper word is the same for all threads and
        # columns.
        descriptor_addresses = [_descriptor_address(ref) for ref in refs]
        like = mgpu.FragmentedArray.splat(float32_constant(0.0), shape, layout=mgpu.WGMMA_LAYOUT, is_signed=None)
        before = [score for tile in sums for register in tile.registers.flat for score in unpack_pair(register)]
        return _inline_ptx(
            like, code, ["=f"] * count + tied_constraints + ["r"] * len(refs), [*before, *descriptor_addresses]
        )

    return run(*accumulators, *refs)  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def add_to_scores_from_registers(scores: jax.Array, queries: jax.Array, keys: Any) -> jax.Array:
    """Issues a product with queries in registers, which saves shared memory bandwidth, added to previous products.

    Args:
        scores: Accumulator registers of `issue_scores`.
        queries: 16-bit elements [64, 64] in an accumulator's layout; they must not change before `wait_for_products`.
        keys: Reference to [keys, 64] of the same dtype.

    Returns:
        The registers of `scores`, not valid until `wait_for_products`.
    """
    return _issue_accumulation(
        scores,
        queries,
        keys,
        [
            step * ROW_BYTES_PER_INSTRUCTION // DESCRIPTOR_UNIT_BYTES
            for step in range(SWIZZLED_ROW_BYTES // ROW_BYTES_PER_INSTRUCTION)
        ],
        b_is_transposed=False,
    )


def accumulate_product(acc: jax.Array, weights: Any, values: Any) -> jax.Array:
    """Issues weights times values, added to an accumulator; returns its registers, which must not be read before
    `wait_for_products`.

    Args:
        acc: Float32 [64, C * 64].
        weights: 16-bit elements [64, keys], in an accumulator's layout or a reference to shared memory; at most 64
            keys.
        values: Reference to [C, keys, 64] of the same dtype, or to the first of C consecutive chunks.
    """
    keys = values.shape[-2]
    # A descriptor's low word has the stride of chunks, its upper word the stride of eight keys.
    descriptor_stride = (keys * SWIZZLED_ROW_BYTES // DESCRIPTOR_UNIT_BYTES) << 16
    offsets = [
        descriptor_stride + key * SWIZZLED_ROW_BYTES // DESCRIPTOR_UNIT_BYTES
        for key in range(0, keys, ROW_BYTES_PER_INSTRUCTION // 2)
    ]
    return _issue_accumulation(acc, weights, values, offsets, b_is_transposed=True)


def accumulate_transposed_product(acc: jax.Array, rows: Any, matrix: Any) -> jax.Array:
    """Issues rows times a matrix whose contracted axis is contiguous, added to an accumulator; returns its registers,
    which must not be read before `wait_for_products`.

    Args:
        acc: Float32 [64, N].
        rows: Reference to 16-bit elements [64, 64] in shared memory.
        matrix: Reference to the first 64 of N consecutive rows [N, 64] of the same dtype, one for each column of the
            accumulator.
    """
    offsets = [
        step * ROW_BYTES_PER_INSTRUCTION // DESCRIPTOR_UNIT_BYTES
        for step in range(SWIZZLED_ROW_BYTES // ROW_BYTES_PER_INSTRUCTION)
    ]
    return _issue_accumulation(acc, rows, matrix, offsets, b_is_transposed=False)


def _issue_accumulation(
    acc: jax.Array, a: Any, b: Any, b_descriptor_offsets: list[int], *, b_is_transposed: bool
) -> jax.Array:
    """Issues one instruction per offset, which is added to the low word of B's descriptor."""
    shape, kind, a_is_in_registers = (
        (WGMMA_M, acc.shape[1]),
        PTX_TYPES[jnp.dtype(b.dtype).name],
        isinstance(a, jax.Array),
    )
    count, ref = _registers_per_thread(shape), plgpu.RefType(wgmma_transforms())
    code = _accumulation_ptx(
        shape[1], kind, b_descriptor_offsets, b_is_transposed=b_is_transposed, a_is_in_registers=a_is_in_registers
    )
    tied_constraints = [str(n) for n in range(count)]

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA, plgpu.Layout.WGMMA if a_is_in_registers else ref, ref),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=plgpu.Layout.WGMMA),
    )
    def run(_: Any, acc: Any, a: Any, b: Any) -> Any:
        before = [value for register in acc.registers.flat for value in unpack_pair(register)]
        word = ir.VectorType.get((1,), int32_type())
        a_operands = (
            [unpack_row_value(vector.bitcast(word, x)) for x in a.registers.flat]
            if a_is_in_registers
            else [_descriptor_address(a)]
        )
        input_constraints = tied_constraints + ["r"] * (len(a_operands) + 1)
        return _inline_ptx(
            acc, code, ["=f"] * count + input_constraints, [*before, *a_operands, _descriptor_address(b)]
        )

    return run(acc, a, b)  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def fence_shared_memory_writes() -> None:
    """Makes a thread's writes to shared memory visible to products of warpgroups that learn of them by an mbarrier.

    All threads that wrote must arrive at that mbarrier after this.
    """

    @plgpu.inline_mgpu()
    def run(_: Any) -> None:
        llvm.inline_asm(None, [], "fence.proxy.async.shared::cta;", "~{memory}", has_side_effects=True)

    run()  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def wait_for_products(acc: jax.Array, *, max_in_flight: int) -> jax.Array:
    """Returns an accumulator once at most `max_in_flight` later groups of products are unfinished.

    Hazard: all registers are operands of the waiting instruction, so the compiler cannot move a read before it.
    """

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA,),
        return_type=plgpu.ShapeDtypeStruct(acc.shape, jnp.float32, layout=plgpu.Layout.WGMMA),
    )
    def run(_: Any, acc: Any) -> Any:
        values = [score for register in acc.registers.flat for score in unpack_pair(register)]
        # Every register is an input and an output of the wait.
        constraints = ["=f"] * len(values) + [str(n) for n in range(len(values))]
        return _inline_ptx(acc, f"wgmma.wait_group.sync.aligned {max_in_flight};", constraints, values)

    return run(acc)  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def _descriptor_address(ref: Any) -> Any:
    """Returns the shared memory address in units of a descriptor."""
    return arith.divui(llvm.ptrtoint(int32_type(), mgpu.utils.memref_ptr(ref)), int32_constant(DESCRIPTOR_UNIT_BYTES))


def _registers_per_thread(shape: tuple[int, int]) -> int:
    """Returns the accumulator registers per thread."""
    return shape[0] * shape[1] // THREADS_PER_WARPGROUP


def _inline_ptx(layout_source: Any, code: str, constraints: list[str], operands: list[Any]) -> Any:
    """Returns an array with the layout of `layout_source`, from the results of inline assembly."""
    f32, count = ir.F32Type.get(), _registers_per_thread(layout_source.shape)
    struct = llvm.StructType.get_literal([f32] * count)
    results: Any = llvm.inline_asm(struct, operands, code, ",".join(constraints), has_side_effects=True)
    values = [llvm.extractvalue(f32, results, [n]) for n in range(count)]
    halves = zip(layout_source.registers.flat, values[::2], values[1::2], strict=True)
    return replace_registers(
        layout_source, [vector.from_elements(register.type, value_pair) for register, *value_pair in halves]
    )


def _product_ptx(
    num_keys: int, columns_per_pair: list[int], ptx_type: str, first_address_operand: int, *, zero_accumulator: bool
) -> str:
    """Returns the PTX of products, one instruction per 32 bytes of a row; the scale-d is false for the first if
    `zero_accumulator`.

    Args:
        num_keys: N of the accumulator.
        columns_per_pair: Columns of every pair of operands.
        ptx_type: PTX type of the operands.
        first_address_operand: Index of the first operand's address among the assembly's operands.
        zero_accumulator: Whether the accumulator is uninitialised.
    """
    sums = ", ".join(f"${n}" for n in range(_registers_per_thread((WGMMA_M, num_keys))))
    element_bytes = ELEMENT_BYTES_BY_PTX_TYPE[ptx_type]
    instruction = f"wgmma.mma_async.sync.aligned.m{WGMMA_M}n{num_keys}k{ROW_BYTES_PER_INSTRUCTION // element_bytes}"
    # Operands of 16 bits have a transposition flag; those of 8 bits cannot be transposed.
    transpose_flags = ", 0, 0" if element_bytes == 2 else ""
    # scale-d is a predicate. Comparing with a register sets it by an instruction, which cannot be folded away.
    ptx_lines = ["{ .reg .pred adds; .reg .b32 zero, upper, place; .reg .b64 left, right;"]
    # The fence orders earlier accesses of these registers before the first product, which is asynchronous.
    ptx_lines += [
        f"mov.b32 zero, 0; mov.b32 upper, {SWIZZLE_128B | columns_per_pair[0] * element_bytes // 2}; "
        "wgmma.fence.sync.aligned;"
    ]
    for pair_number, size in enumerate(columns_per_pair):
        operand_index = first_address_operand + 2 * pair_number
        ptx_lines += [f"mov.b32 upper, {SWIZZLE_128B | size * element_bytes // 2};"] * (pair_number > 0)
        for column in range(0, size, ROW_BYTES_PER_INSTRUCTION // element_bytes):
            # Atoms of the same eight rows are consecutive, 8 x 128 bytes apart; within one, the hardware applies the
            # swizzle to addresses, so columns advance as if there were none.
            atom, byte_in_atom = divmod(column * element_bytes, SWIZZLED_ROW_BYTES)
            descriptor_units = (atom * 8 * SWIZZLED_ROW_BYTES + byte_in_atom) // DESCRIPTOR_UNIT_BYTES
            ptx_lines += [f"add.u32 place, ${operand_index}, {descriptor_units}; mov.b64 left, {{place, upper}};"]
            ptx_lines += [f"add.u32 place, ${operand_index + 1}, {descriptor_units}; mov.b64 right, {{place, upper}};"]
            # False only for the first product of a fresh accumulator, whose content is then ignored.
            ptx_lines += [f"setp.ne.b32 adds, zero, {column + pair_number + (not zero_accumulator)};"]
            ptx_lines += [
                f"{instruction}.f32.{ptx_type}.{ptx_type} {{{sums}}}, left, right, adds, 1, 1{transpose_flags};"
            ]
    return "\n".join([*ptx_lines, "wgmma.commit_group.sync.aligned; }"])


def _accumulation_ptx(
    num_columns: int, ptx_type: str, b_descriptor_offsets: list[int], *, b_is_transposed: bool, a_is_in_registers: bool
) -> str:
    """Returns the PTX of `_issue_accumulation`. The assembly's operands are the results, then the previous sums, A, and
    B.

    Args:
        num_columns: N of the accumulator.
        ptx_type: PTX type of A and B.
        b_descriptor_offsets: Offset of each instruction from B's address.
        b_is_transposed: Whether the columns of B are contiguous instead of its rows.
        a_is_in_registers: Whether A is four registers per instruction, or one address.
    """
    count = _registers_per_thread((WGMMA_M, num_columns))
    first, sums = 2 * count, ", ".join(f"${n}" for n in range(count))
    b_operand = first + (4 * len(b_descriptor_offsets) if a_is_in_registers else 1)
    product_shape = f"m{WGMMA_M}n{num_columns}k{ROW_BYTES_PER_INSTRUCTION // 2}"
    instruction = f"wgmma.mma_async.sync.aligned.{product_shape}.f32.{ptx_type}.{ptx_type} {{{sums}}}"
    ptx_lines = ["{ .reg .pred adds; .reg .b32 place, upper; .reg .b64 left, right; setp.ne.b32 adds, 1, 0;"]
    # Eight rows of 128 bytes are contiguous, in A and in B.
    ptx_lines += [
        f"mov.b32 upper, {SWIZZLE_128B | 8 * SWIZZLED_ROW_BYTES // DESCRIPTOR_UNIT_BYTES}; wgmma.fence.sync.aligned;"
    ]
    for step, offset in enumerate(b_descriptor_offsets):
        ptx_lines += [f"add.u32 place, ${b_operand}, {offset}; mov.b64 right, {{place, upper}};"]
        if a_is_in_registers:
            a = ", ".join(f"${first + 4 * step + n}" for n in range(4))
            ptx_lines += [f"{instruction}, {{{a}}}, right, adds, 1, 1, {int(b_is_transposed)};"]
        else:
            ptx_lines += [
                f"add.u32 place, ${first}, {step * ROW_BYTES_PER_INSTRUCTION // DESCRIPTOR_UNIT_BYTES}; "
                "mov.b64 left, {place, upper};"
            ]
            ptx_lines += [f"{instruction}, left, right, adds, 1, 1, 0, {int(b_is_transposed)};"]
    return "\n".join([*ptx_lines, "wgmma.commit_group.sync.aligned; }"])
