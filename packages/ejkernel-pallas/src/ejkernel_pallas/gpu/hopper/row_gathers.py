"""Rows of a matrix that are gathered into shared memory by asynchronous copies of 16 bytes, a row of 128 bytes a time.

    thread          0  1  2 ..  7 |  8  9 .. 15 | ... 127      eight threads copy a line of 128 bytes
    row of a tile         0       |      1      | ... 15       and again for rows 16.., 32.., 48..

Copies by tensor maps take rows that follow each other; one a row would be an instruction of one thread each. Here every
thread names its own places. A thread's lines have the same place in the swizzle, as its rows lie 16 apart.
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
"""In place of where a row lies: it is zeros."""
LARGEST = 2**31 * STORE_BYTES
"""Bytes of the matrix that places of 32 bits reach."""
# The source's size, 16 or 0, is a number of its own: where it is 0, zeros are written and nothing is read.
COPY = """{
.reg .pred named; .reg .b64 place; .reg .b32 offset, size;
setp.ge.s32 named, $2, 0;
selp.b32 size, 16, 0, named;
max.s32 offset, $2, 0;
mad.wide.u32 place, offset, 16, $1;
cp.async.cg.shared.global.L2::128B [$0], [place], 16, size;
}"""


def find_rows(index: Any, firsts: list[Any], size: int, rows: int) -> jax.Array:
    """Returns where a warpgroup's threads find what they copy of 64 rows for each of `firsts`, in units of 16 bytes.

    Args:
        index: Reference to int32 [M] in device memory, for every row of tiles the row of the matrix, or no row of it.
        firsts: First rows of tiles, int32; rows from M on are the last one again.
        size: Bytes of a row of the matrix.
        rows: Rows of the matrix.

    Returns:
        int32, an element a register: those of the first tile's rows first.
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
            # Unsigned: what is below zero is beyond the last row, too.
            named = arith.cmpi(arith.CmpIPredicate.ult, found, constant(rows))
            found = arith.addi(arith.muli(found, constant(size // STORE_BYTES)), part)
            registers[place] = vector.from_elements(kind, [arith.select(named, found, constant(NONE))])
        return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGStridedFragLayout(shape, 1), _is_signed=True)

    return find(index, *firsts)  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def copy_rows(matrix: Any, places: jax.Array, line: Any, target: Any) -> None:
    """Begins to copy 128 bytes of every row, as one group of the thread's copies.

    Args:
        matrix: Reference to [rows, columns] in device memory.
        places: Of `find_rows`.
        line: Which 128 bytes of a row, int32.
        target: Reference to the first of the tiles of 64 rows in shared memory, in the order that products read; the
            others follow.
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
        # The swizzle: a row's parts change places by the row's number among eight.
        part = arith.xori(part, arith.andi(row, constant(LINE_THREADS - 1)))
        within = arith.addi(arith.muli(row, constant(LINE)), arith.muli(part, constant(STORE_BYTES)))
        begin = arith.addi(llvm.ptrtoint(i32(), mgpu.utils.memref_ptr(target)), within)
        for number, place in enumerate(places.registers.flat):
            # Tiles of 64 rows follow each other, so that passes of 16 rows do.
            at = arith.addi(begin, constant(number * PASS_ROWS * LINE))
            _assembly(COPY, "r,l,r", [at, base, scalar(place)])
        _assembly("cp.async.commit_group;", "", [])

    copy(matrix, places, line, target)  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def wait_rows(in_flight: int) -> None:
    """Waits until at most `in_flight` later groups of a thread's copies are unfinished, and shows them to products.

    Products of warpgroups that learn of them by a barrier: all threads have to arrive there after this.
    """

    @plgpu.inline_mgpu()
    def run(_: Any) -> None:
        # These copies write by the generic proxy, products read by the asynchronous one.
        _assembly(f"cp.async.wait_group {in_flight}; fence.proxy.async.shared::cta;", "", [])

    run()  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def _assembly(code: str, constraints: str, operands: list[Any]) -> None:
    constraints = f"{constraints},~{{memory}}" if constraints else "~{memory}"
    llvm.inline_asm(None, operands, code, constraints, has_side_effects=True)
