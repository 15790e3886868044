"""Gathers rows of a matrix into shared memory by asynchronous copies of 16 bytes, 128 bytes of each row at a time.

    thread          0  1  2 ..  7 |  8  9 .. 15 | ... 127      eight threads copy a line of 128 bytes
    row of a tile         0       |      1      | ... 15       and again for rows 16.., 32.., 48..

TMA copies contiguous rows; gathering by TMA would take one instruction of one thread per row. Here every thread copies
to its own addresses. Its rows are 16 apart, so their lines have the same position in the swizzle.
"""

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, vector

from ejkernel_pallas.gpu.hopper.launch import wgmma_transforms
from ejkernel_pallas.gpu.hopper.layouts import ROW_LAYOUT
from ejkernel_pallas.gpu.hopper.registers import float32_constant, int32_constant, int32_type, unpack_row_value
from ejkernel_pallas.gpu.hopper.row_ranges import LINE_BYTES, ROWS_PER_PASS, THREADS_PER_LINE
from ejkernel_pallas.gpu.hopper.scaled_sums import first_row_of_thread, row_vector_from_thread_values
from ejkernel_pallas.gpu.hopper.sizes import ROWS_PER_WARP, STORE_BYTES_PER_THREAD, THREADS_PER_WARPGROUP, WGMMA_M

NOT_COPIED_OFFSET = -1
"""Stands for a row that is not copied but zeroed."""
# The source's size is an operand, 16 or 0: with 0, zeros are written and nothing is read.
COPY_16_BYTES_PTX = """{
.reg .pred named; .reg .b64 place; .reg .b32 offset, size;
setp.ge.s32 named, $2, 0;
selp.b32 size, 16, 0, named;
max.s32 offset, $2, 0;
mad.wide.u32 place, offset, 16, $1;
cp.async.cg.shared.global.L2::128B [$0], [place], 16, size;
}"""


def find_row_offsets(row_indices: Any, first_rows: list[Any], row_bytes: int, num_rows: int) -> jax.Array:
    """Returns the offsets, in units of 16 bytes, of what each thread copies of 64 rows for each of `first_rows`.

    Args:
        row_indices: Reference to int32 [M] in device memory: for every row of tiles the row of the matrix, or an
            invalid one.
        first_rows: First rows of tiles, int32; rows past M repeat the last one.
        row_bytes: Bytes per row of the matrix.
        num_rows: Rows of the matrix.

    Returns:
        int32, one element per register: those of the first tile's rows first.
    """
    passes_per_tile, number = WGMMA_M // ROWS_PER_PASS, plgpu.Layout.WG_SPLAT(())
    shape = (THREADS_PER_WARPGROUP * passes_per_tile * len(first_rows),)
    last = row_indices.shape[0] - 1

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(()), *(number for _ in first_rows)),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.int32, layout=plgpu.Layout.WG_STRIDED(shape, vec_size=1)),
    )
    def compute_offsets(_: Any, row_indices: Any, *first_rows: Any) -> Any:
        thread = arith.remui(mgpu.utils.thread_idx(), int32_constant(THREADS_PER_WARPGROUP))
        row, line_part = (
            arith.divui(thread, int32_constant(THREADS_PER_LINE)),
            arith.remui(thread, int32_constant(THREADS_PER_LINE)),
        )
        vector_type, registers = (
            ir.VectorType.get((1,), int32_type()),
            np.empty((passes_per_tile * len(first_rows),), dtype=object),
        )
        for register_index in range(registers.size):
            tile, pass_index = divmod(register_index, passes_per_tile)
            tile_row = arith.addi(
                first_rows[tile].registers.item(), arith.addi(row, int32_constant(pass_index * ROWS_PER_PASS))
            )
            tile_row = arith.index_cast(ir.IndexType.get(), arith.minsi(tile_row, int32_constant(last)))
            source_row: Any = memref.load(row_indices, [tile_row])
            # An unsigned comparison: negative indices are also past the last row.
            is_valid = arith.cmpi(arith.CmpIPredicate.ult, source_row, int32_constant(num_rows))
            source_row = arith.addi(
                arith.muli(source_row, int32_constant(row_bytes // STORE_BYTES_PER_THREAD)), line_part
            )
            registers[register_index] = vector.from_elements(
                vector_type, [arith.select(is_valid, source_row, int32_constant(NOT_COPIED_OFFSET))]
            )
        return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGStridedFragLayout(shape, 1), _is_signed=True)

    return compute_offsets(row_indices, *first_rows)  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def load_row_validity(row_indices: Any, first_row: Any, num_rows: int) -> jax.Array:
    """Returns for 64 rows of tiles whether they name a row of the matrix: 1 or 0, float32 [64] in the layout of an
    accumulator's rows.

    Args:
        row_indices: Reference to int32 [M] in device memory, as in `find_row_offsets`.
        first_row: First row, int32; rows past M repeat the last one.
        num_rows: Rows of the matrix.
    """
    last = row_indices.shape[0] - 1

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(()), plgpu.Layout.WG_SPLAT(())),
        return_type=plgpu.ShapeDtypeStruct((WGMMA_M,), jnp.float32, layout=ROW_LAYOUT),
    )
    def load(_: Any, row_indices: Any, first_row: Any) -> Any:
        thread_row, flags = arith.addi(first_row.registers.item(), first_row_of_thread()), list[Any]()
        for half in (0, ROWS_PER_WARP // 2):
            tile_row = arith.minsi(arith.addi(thread_row, int32_constant(half)), int32_constant(last))
            source_row: Any = memref.load(row_indices, [arith.index_cast(ir.IndexType.get(), tile_row)])
            is_valid = arith.cmpi(arith.CmpIPredicate.ult, source_row, int32_constant(num_rows))
            flags.append(arith.select(is_valid, float32_constant(1.0), float32_constant(0.0)))
        return row_vector_from_thread_values(flags)

    return load(row_indices, first_row)  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def copy_gathered_rows(matrix: Any, row_offsets: jax.Array, line_index: Any, target: Any) -> None:
    """Starts to copy 128 bytes of every row, as one group of the thread's copies.

    Args:
        matrix: Reference to [rows, columns] in device memory.
        row_offsets: The result of `find_row_offsets`.
        line_index: Index of the 128 bytes in a row, int32.
        target: Reference to the first of the consecutive tiles of 64 rows in shared memory, in the layout of products.
    """

    @plgpu.inline_mgpu(
        arg_types=(
            plgpu.RefType(()),
            plgpu.Layout.WG_STRIDED(row_offsets.shape, vec_size=1),
            plgpu.Layout.WG_SPLAT(()),
            plgpu.RefType(wgmma_transforms()),
        )
    )
    def copy(_: Any, matrix: Any, row_offsets: Any, line_index: Any, target: Any) -> None:
        i64 = ir.IntegerType.get_signless(64)
        base = llvm.ptrtoint(i64, mgpu.utils.memref_ptr(matrix))
        offset = arith.extui(i64, arith.muli(line_index.registers.item(), int32_constant(LINE_BYTES)))
        base = arith.addi(base, offset)
        thread = arith.remui(mgpu.utils.thread_idx(), int32_constant(THREADS_PER_WARPGROUP))
        row, line_part = (
            arith.divui(thread, int32_constant(THREADS_PER_LINE)),
            arith.remui(thread, int32_constant(THREADS_PER_LINE)),
        )
        # The swizzle: a row's 16-byte pieces are permuted by the row's index modulo eight.
        line_part = arith.xori(line_part, arith.andi(row, int32_constant(THREADS_PER_LINE - 1)))
        offset_in_tile = arith.addi(
            arith.muli(row, int32_constant(LINE_BYTES)), arith.muli(line_part, int32_constant(STORE_BYTES_PER_THREAD))
        )
        first_address = arith.addi(llvm.ptrtoint(int32_type(), mgpu.utils.memref_ptr(target)), offset_in_tile)
        for pass_index, row_offset in enumerate(row_offsets.registers.flat):
            # Tiles of 64 rows are contiguous, and so are passes of 16 rows.
            target_address = arith.addi(first_address, int32_constant(pass_index * ROWS_PER_PASS * LINE_BYTES))
            _inline_ptx(COPY_16_BYTES_PTX, "r,l,r", [target_address, base, unpack_row_value(row_offset)])
        _inline_ptx("cp.async.commit_group;", "", [])

    copy(matrix, row_offsets, line_index, target)  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def wait_for_gathered_rows(max_in_flight: int) -> None:
    """Waits until at most `max_in_flight` later groups of a thread's copies are unfinished, and makes the others
    visible to WGMMA.

    Warpgroups learn of them by an mbarrier at which all threads must arrive after this.
    """

    @plgpu.inline_mgpu()
    def run(_: Any) -> None:
        # These copies write through the generic proxy, products read through the async proxy.
        _inline_ptx(f"cp.async.wait_group {max_in_flight}; fence.proxy.async.shared::cta;", "", [])

    run()  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def _inline_ptx(code: str, constraints: str, operands: list[Any]) -> None:
    constraints = f"{constraints},~{{memory}}" if constraints else "~{memory}"
    llvm.inline_asm(None, operands, code, constraints, has_side_effects=True)
