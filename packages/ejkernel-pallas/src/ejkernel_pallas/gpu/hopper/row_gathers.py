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

from ejkernel_pallas.gpu.hopper.launch import transforms
from ejkernel_pallas.gpu.hopper.registers import constant, i32, scalar
from ejkernel_pallas.gpu.hopper.row_ranges import LINE, LINE_THREADS, PASS_ROWS, STORE_BYTES
from ejkernel_pallas.gpu.hopper.sizes import THREADS, WGMMA_M

NONE = -1
"""Stands for a row that is not copied but zeroed."""
LARGEST = 2**31 * STORE_BYTES
"""Largest size in bytes of a matrix whose rows 32-bit offsets can address."""
# The source's size is an operand, 16 or 0: with 0, zeros are written and nothing is read.
COPY = """{
.reg .pred named; .reg .b64 place; .reg .b32 offset, size;
setp.ge.s32 named, $2, 0;
selp.b32 size, 16, 0, named;
max.s32 offset, $2, 0;
mad.wide.u32 place, offset, 16, $1;
cp.async.cg.shared.global.L2::128B [$0], [place], 16, size;
}"""


def find_rows(index: Any, firsts: list[Any], size: int, rows: int) -> jax.Array:
    """Returns the offsets, in units of 16 bytes, of what each thread copies of 64 rows for each of `firsts`.

    Args:
        index: Reference to int32 [M] in device memory: for every row of tiles the row of the matrix, or an invalid one.
        firsts: First rows of tiles, int32; rows past M repeat the last one.
        size: Bytes per row of the matrix.
        rows: Rows of the matrix.

    Returns:
        int32, one element per register: those of the first tile's rows first.
    """
    per_tile, number = WGMMA_M // PASS_ROWS, plgpu.Layout.WG_SPLAT(())
    shape = (THREADS * per_tile * len(firsts),)
    last = index.shape[0] - 1

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(()), *(number for _ in firsts)),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.int32, layout=plgpu.Layout.WG_STRIDED(shape, vec_size=1)),
    )
    def find(_: Any, index: Any, *firsts: Any) -> Any:
        thread = arith.remui(mgpu.utils.thread_idx(), constant(THREADS))
        row, part = arith.divui(thread, constant(LINE_THREADS)), arith.remui(thread, constant(LINE_THREADS))
        kind, registers = ir.VectorType.get((1,), i32()), np.empty((per_tile * len(firsts),), dtype=object)
        for place in range(registers.size):
            tile, passed = divmod(place, per_tile)
            here = arith.addi(firsts[tile].registers.item(), arith.addi(row, constant(passed * PASS_ROWS)))
            here = arith.index_cast(ir.IndexType.get(), arith.minsi(here, constant(last)))
            found: Any = memref.load(index, [here])
            # An unsigned comparison: negative indices are also past the last row.
            named = arith.cmpi(arith.CmpIPredicate.ult, found, constant(rows))
            found = arith.addi(arith.muli(found, constant(size // STORE_BYTES)), part)
            registers[place] = vector.from_elements(kind, [arith.select(named, found, constant(NONE))])
        return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGStridedFragLayout(shape, 1), _is_signed=True)

    return find(index, *firsts)  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def copy_rows(matrix: Any, places: jax.Array, line: Any, target: Any) -> None:
    """Starts to copy 128 bytes of every row, as one group of the thread's copies.

    Args:
        matrix: Reference to [rows, columns] in device memory.
        places: The result of `find_rows`.
        line: Index of the 128 bytes in a row, int32.
        target: Reference to the first of the consecutive tiles of 64 rows in shared memory, in the layout of products.
    """

    @plgpu.inline_mgpu(
        arg_types=(
            plgpu.RefType(()),
            plgpu.Layout.WG_STRIDED(places.shape, vec_size=1),
            plgpu.Layout.WG_SPLAT(()),
            plgpu.RefType(transforms()),
        )
    )
    def copy(_: Any, matrix: Any, places: Any, line: Any, target: Any) -> None:
        i64 = ir.IntegerType.get_signless(64)
        base = llvm.ptrtoint(i64, mgpu.utils.memref_ptr(matrix))
        offset = arith.extui(i64, arith.muli(line.registers.item(), constant(LINE)))
        base = arith.addi(base, offset)
        thread = arith.remui(mgpu.utils.thread_idx(), constant(THREADS))
        row, part = arith.divui(thread, constant(LINE_THREADS)), arith.remui(thread, constant(LINE_THREADS))
        # The swizzle: a row's 16-byte pieces are permuted by the row's index modulo eight.
        part = arith.xori(part, arith.andi(row, constant(LINE_THREADS - 1)))
        within = arith.addi(arith.muli(row, constant(LINE)), arith.muli(part, constant(STORE_BYTES)))
        begin = arith.addi(llvm.ptrtoint(i32(), mgpu.utils.memref_ptr(target)), within)
        for number, place in enumerate(places.registers.flat):
            # Tiles of 64 rows are contiguous, and so are passes of 16 rows.
            at = arith.addi(begin, constant(number * PASS_ROWS * LINE))
            _assembly(COPY, "r,l,r", [at, base, scalar(place)])
        _assembly("cp.async.commit_group;", "", [])

    copy(matrix, places, line, target)  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def wait_rows(in_flight: int) -> None:
    """Waits until at most `in_flight` later groups of a thread's copies are unfinished, and makes the others visible to
    WGMMA.

    Warpgroups learn of them by an mbarrier at which all threads must arrive after this.
    """

    @plgpu.inline_mgpu()
    def run(_: Any) -> None:
        # These copies write through the generic proxy, products read through the async proxy.
        _assembly(f"cp.async.wait_group {in_flight}; fence.proxy.async.shared::cta;", "", [])

    run()  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def _assembly(code: str, constraints: str, operands: list[Any]) -> None:
    constraints = f"{constraints},~{{memory}}" if constraints else "~{memory}"
    llvm.inline_asm(None, operands, code, constraints, has_side_effects=True)
