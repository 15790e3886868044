"""Rows times the matrix of their group on Hopper: the forward pass, and the gradient of lhs.

    warpgroup 2, producer        A A B | A A B | A A B | ...      TMA, up to `stages` steps ahead, across tiles
                                  |       |       |               full barriers
    warpgroup 0, consumer         [64, 64] x [64, BN]  ...  acc   WGMMA; a step behind, free barriers
    warpgroup 1, consumer         [64, 64] x [64, BN]  ...  acc
                                                             |
                     registers -> slots of shared memory -> TMA; overlapped, while the next tile's first products run

A block is persistent: it takes every `blocks`-th tile of the list, or the next one of a counter (work_queue.py). Each
warpgroup has 64 rows, which need not begin at a multiple of anything, so A is copied for each with a row of its own. In
a group's last tile they begin so that they end with the group: the rows that are in two tiles are stored twice, with
the same bits, and bulk copies of 64 rows serve. Only groups of fewer than 64 rows store row by row.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ejkernel.families.grouped_matmul.row_tiles import FIELDS
from ejkernel_pallas.gpu.grouped_matmul import gated, producer, scaled, work_queue
from ejkernel_pallas.gpu.grouped_matmul.call import Call
from ejkernel_pallas.gpu.grouped_matmul.scaled import Part
from ejkernel_pallas.gpu.grouped_matmul.spec import (
    LEAD,
    WARPGROUPS,
    Scaling,
)
from ejkernel_pallas.gpu.grouped_matmul.tiles import Tile, cluster_tiles, split, tile_of
from ejkernel_pallas.gpu.grouped_matmul.versions import run_first
from ejkernel_pallas.gpu.hopper import arrays, clusters
from ejkernel_pallas.gpu.hopper.row_ranges import store_rows
from ejkernel_pallas.gpu.hopper.sizes import WGMMA_M

I32 = jnp.int32


@dataclasses.dataclass(frozen=True)
class Shared:
    """Buffers in shared memory and their barriers.

    Attributes:
        a: Rows as products read them, [stages * warpgroups, 64, 64], or of 8 bits [..., 128].
        a_lines: The same memory as copies write it: row after row, so that they may begin anywhere.
        b: Tiles of matrices, [stages, 64, BN] or [stages, BN, 64], or of 8 bits [stages, BN, 128].
        b_half: The same memory as half tiles, [2 * stages, 64, BN / 2] or the like; None where tiles are not split.
        out: Slots of the output as registers are written, [warpgroups * slots, 64, part].
        out_lines: The same memory, as copies read it.
        full: The operands of a stage are there.
        free: They have been read.
        columns: Scales of a step's columns, float32 [stages + 1, BN]; None without scales.
        row_scales: Scales of each warpgroup's rows in some blocks, float32 [stages, warpgroups, 64, blocks]; None where
            no copies bring them.
        number: Numbers of the block's next tiles, after even and after odd ones, int32 [2]; None without a counter.
        number_full: They are there.
        number_free: They have been read.
    """

    a: Any
    a_lines: Any
    b: Any
    out: Any
    out_lines: Any
    full: Any
    free: Any
    b_half: Any = None
    columns: Any = None
    row_scales: Any = None
    number: Any = None
    number_full: Any = None
    number_free: Any = None


def rows_kernel(call: Call) -> None:
    """Body of the kernel: what each warpgroup does for all tiles of its block."""
    warpgroup, spec, table = lax.axis_index("warpgroup"), call.spec, call.operands["tiles"]
    # Tiles of rows of no group, of groups, and all: counted on the device, as sizes of groups may be traced.
    before, count, total = (table[spec.entries, n] for n in range(3))
    if "same" in call.operands:
        call = dataclasses.replace(call, same=call.operands["same"][0] != 0)
    first = lax.axis_index("block")

    def every(work: Any, tiles: Any, *state: Any) -> Any:
        # A block's first tile has the block's number; `work` gives the number of the next.
        limit = cluster_tiles(spec, tiles) * spec.across
        if work.func in (producer.fetch_tile, _multiply_tile):
            limit = limit + split(call, tiles)
        return lax.while_loop(lambda carry: carry[0] < limit, work, (first, I32(0), *state))[1:]

    @pl.when(warpgroup < WARPGROUPS)
    def _multiply() -> None:
        plgpu.set_max_registers(spec.registers[0], action="increase")
        # Rows of no group first: these stores overlap with the producer's first copies.
        every(functools.partial(_fill, call, before, count, total), total - count)
        if spec.overlapped:
            # The tile before the first: it ends at row 0, so nothing of it is stored.
            nothing = arrays.full_tile((WGMMA_M, spec.tile.block_n)).astype(spec.out), I32(0), I32(0), I32(0)
            last = every(functools.partial(_multiply_overlapped, call, before, count), count, *nothing)
            _write(call, [last[1]], *last[2:])
        else:
            every(functools.partial(_multiply_tile, call, before, count), count)
        # The block's shared memory has to last as long as the copies that read it.
        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == WARPGROUPS)
    def _fetch() -> None:
        plgpu.set_max_registers(spec.registers[1], action="decrease")
        (done,) = every(functools.partial(producer.fetch_tile, call, before, count), count)
        if spec.gathers:
            pl.when(done > 0)(lambda: producer.gathered(call, done - 1, in_flight=0))

    if spec.members > 1:
        clusters.end()  # copies and arrivals of the other member reach into this one's shared memory


def _multiply_tile(call: Call, before: Any, count: Any, carry: Any) -> Any:
    """A warpgroup's part of a tile, from its products to memory."""
    number, done = carry
    run_first(_versions(call, tile_of(call, before, count, number), done))
    return work_queue.next_number(call, number, done), done + call.spec.steps


def _versions(call: Call, tile: Tile, done: Any) -> Iterator[tuple[Any, Callable[[], None]]]:
    """What a warpgroup does for a tile: the first of these that holds, the last, with None, for all others.

    N of a product is a constant of its code, so a tile has several versions; both warpgroups choose the same.
    """
    spec, warpgroup = call.spec, lax.axis_index("warpgroup")
    size, half = spec.tile.block_n, spec.tile.block_n // 2
    product, few = functools.partial(_product, call, tile, done), tile.end - tile.row <= WGMMA_M
    if spec.tile.halves:
        # Both warpgroups have the only 64 rows, and half of the columns each.
        yield few, functools.partial(product, Part(I32(0), warpgroup * half, half))
    if spec.gate and spec.gate.alone:
        # The first warpgroup has all rows. What the other would make is the same, and takes power.
        yield few & (warpgroup > 0), functools.partial(_pass, call, done)
    if spec.splits:
        yield tile.half >= 0, functools.partial(product, Part(warpgroup, tile.half * half, half, split=True))
    if spec.tail:
        # Where products are scaled, zero is an opaque offset, no row being below 0: addresses that versions have in
        # common would be held in registers across their loops, and sums would spill.
        start = jnp.minimum(tile.row, 0) if spec.scaling and not spec.scaling.quick else 0
        # Columns that the output does not have are not multiplied.
        yield tile.column + size > spec.columns, functools.partial(product, Part(warpgroup, start, spec.tail))
    if spec.scaling and spec.scaling.by_columns:
        yield few, functools.partial(_product_of_columns, call, spec.scaling, tile, done, 1)
        yield None, functools.partial(_product_of_columns, call, spec.scaling, tile, done, WARPGROUPS)
    else:
        yield None, functools.partial(product, Part(warpgroup, 0, size))


def _product(call: Call, tile: Tile, done: Any, part: Part) -> None:
    """A warpgroup's 64 rows and a part of the columns."""
    spec, shared, row = call.spec, call.shared, tile.first(part.rows)
    rows = scaled.Rows((part.rows,), (row,), done)
    if spec.scaling and not spec.scaling.quick:
        made = scaled.sums(call, spec.scaling, rows, part)
    elif spec.gate:
        made = gated.products(call, spec.gate.activation, done, part)
    else:
        acc = pl.run_scoped(
            functools.partial(_steps, call, done, part), plgpu.WGMMAAccumulatorRef((WGMMA_M, part.size), jnp.float32)
        )
        # The stage of the last product, which no later step of this tile frees.
        plgpu.barrier_arrive(shared.free.at[lax.rem(done + (spec.steps - 1), I32(spec.tile.stages))])
        made = scaled.scaled_tiles(call, spec.scaling, [acc], rows, part.start) if spec.scaling else [acc]
    _write(call, made, row, tile.column + part.start, tile.end)


def _product_of_columns(call: Call, scaling: Scaling, tile: Tile, done: Any, parts: int) -> None:
    """So many times 64 rows, and the columns of a product."""
    firsts, size = tuple(tile.first(part) for part in range(parts)), scaling.product_n
    start = lax.axis_index("warpgroup") * size
    made = scaled.sums(call, scaling, scaled.Rows(tuple(range(parts)), firsts, done), Part(None, start, size))
    if parts == 1:
        return _write(call, made, firsts[0], tile.column + start, tile.end)
    # The group has more than 64 rows, so that copies serve.
    pieces = [_pieces(call, [acc], row, tile.column + start) for row, acc in zip(firsts, made, strict=True)]
    _copy_out(call, [piece for one in pieces for piece in one])


def _pass(call: Call, done: Any) -> None:
    """Frees the stages of a tile that another warpgroup multiplies."""
    shared, stages = call.shared, call.spec.tile.stages

    def step(index: Any, carry: None) -> None:
        slot = lax.rem(done + index, I32(stages))
        plgpu.barrier_wait(shared.full.at[slot])
        plgpu.barrier_arrive(shared.free.at[slot])

    lax.fori_loop(0, call.spec.steps, step, None)


def _multiply_overlapped(call: Call, before: Any, count: Any, carry: Any) -> Any:
    """A warpgroup's part of a tile in registers, whose first products run while the tile before is written."""
    number, done, *left = carry
    tile, spec, warpgroup = tile_of(call, before, count, number), call.spec, lax.axis_index("warpgroup")
    part, shared = Part(warpgroup, 0, spec.tile.block_n), call.shared
    lead = min(LEAD, spec.steps)

    def products(acc: Any) -> Any:
        lax.fori_loop(0, lead, lambda index, _: _multiply(call, done + index, part, acc), None)
        # The tile before leaves while the tensor cores work: its registers are 16-bit, beside the accumulator's.
        _write(call, [left[0]], *left[1:])
        # All but the last of the leading products have read their stages.
        plgpu.wgmma_wait(1)
        for index in range(lead - 1):
            plgpu.barrier_arrive(shared.free.at[lax.rem(done + index, I32(spec.tile.stages))])
        lax.fori_loop(lead, spec.steps, functools.partial(_step, call, part, acc), done + lead)
        return acc[...]

    made = pl.run_scoped(products, plgpu.WGMMAAccumulatorRef((WGMMA_M, part.size), jnp.float32)).astype(spec.out)
    done = done + spec.steps
    plgpu.barrier_arrive(shared.free.at[lax.rem(done - 1, I32(spec.tile.stages))])
    return number + call.blocks, done, made, tile.first(warpgroup), tile.column, tile.end


def _steps(call: Call, done: Any, part: Part, acc: Any) -> Any:
    """The products of a warpgroup's part of a tile."""
    lax.fori_loop(0, call.spec.steps, functools.partial(_step, call, part, acc), done)
    return acc[...]


def _step(call: Call, part: Part, acc: Any, index: Any, done: Any) -> Any:
    """A product, and the end of the one before: the stage that it has read is free."""
    shared, stages = call.shared, call.spec.tile.stages
    _multiply(call, done, part, acc)
    # One product stays in flight, so the tensor cores never run dry.
    plgpu.wgmma_wait(1)
    last = lax.rem(done + (stages - 1), I32(stages))
    # At 0 the product before was the last of another tile, which has freed its stage itself.
    pl.when(index > 0)(lambda: plgpu.barrier_arrive(shared.free.at[last]))
    return done + 1


def _multiply(call: Call, done: Any, part: Part, acc: Any) -> None:
    """Begins the product of a step."""
    spec, shared = call.spec, call.shared
    columns = () if part.size == spec.tile.block_n else (pl.ds(part.start, part.size),)
    slot = lax.rem(done, I32(spec.tile.stages))
    plgpu.barrier_wait(shared.full.at[slot])
    half = columns if spec.transposed or not columns else (slice(None), *columns)
    matrix = shared.b_half.at[2 * slot] if part.split else shared.b.at[slot, *half]
    # A view: descriptors of 16-bit operands say which axis is contiguous, so nothing is moved.
    matrix = matrix.transpose((1, 0)) if spec.transposed else matrix
    plgpu.wgmma(acc, shared.a.at[slot * WARPGROUPS + part.rows], matrix)


def _fill(call: Call, before: Any, count: Any, total: Any, carry: Any) -> Any:
    """Zeros for a warpgroup's part of a tile of rows of no group: the first entries and the last ones."""
    number, done = carry
    spec, table = call.spec, call.operands["tiles"]
    tile_row = lax.div(number, I32(spec.across)) * spec.tile.cluster_m + call.below
    entry = jnp.minimum(tile_row, total - count - 1)
    # The entries of groups lie between those of rows of no group.
    entry = jnp.where(entry < before, entry, entry + count)
    _, row, end, begin = (table[entry, n] for n in range(FIELDS))
    column = (lax.rem(number, I32(spec.across)) * spec.tile.cluster_n + call.beside) * spec.tile.block_n
    tile = Tile(I32(0), jnp.bool_(False), row, begin, end, column)
    zeros = arrays.full_tile((WGMMA_M, spec.tile.block_n))
    _write(call, [zeros], tile.first(lax.axis_index("warpgroup")), tile.column, end)
    return number + call.blocks, done


def _write(call: Call, tiles: list[Any], row: Any, column: Any, end: Any) -> None:
    """Writes a warpgroup's rows before `end`; tiles lie side by side."""
    tiles = [made.astype(call.spec.out) for made in tiles]
    whole = end - row >= WGMMA_M
    pl.when(whole)(lambda: _copy_out(call, _pieces(call, tiles, row, column)))

    @pl.when(~whole)
    def _store() -> None:
        # A group of fewer than 64 rows: a copy would overwrite those of the next group.
        for number, made in enumerate(tiles):
            store_rows(call.output, made, row, column + number * made.shape[1], end - row)


def _pieces(call: Call, tiles: list[Any], row: Any, column: Any) -> list[tuple[Any, Any, Any]]:
    """What is copied of tiles that lie side by side: first row, first column, and the numbers, of a slot's columns."""
    width = call.spec.part
    parts = [made[:, n : n + width].astype(call.spec.out) for made in tiles for n in range(0, made.shape[1], width)]
    return [(row, column + number * width, part) for number, part in enumerate(parts)]


def _copy_out(call: Call, pieces: list[tuple[Any, Any, Any]]) -> None:
    """Writes pieces of 64 rows by way of shared memory, one after the other."""
    spec, shared, slots = call.spec, call.shared, call.spec.tile.slots
    first = lax.axis_index("warpgroup") * slots
    # All at once, if there are slots for all: two barriers in place of two a piece.
    together = len(pieces) if len(pieces) <= slots else 1

    def group(begin: int) -> None:
        # The copies that had the slots have read them: those of the last tile, and all but the last few of this one.
        plgpu.wait_smem_to_gmem(min(begin, slots - together), wait_read_only=True)
        for number in range(begin, begin + together):
            shared.out[first + number % slots] = pieces[number][2]
        # Fence: copies read by the asynchronous proxy what all threads of the warpgroup wrote by the generic one.
        plgpu.commit_smem()
        for number in range(begin, begin + together):
            row, column, _ = pieces[number]
            # Columns of the last tile that the output does not have need no copy.
            whole = spec.even or together == 1
            copy = functools.partial(_copy_piece, call, first + number % slots, row, column)
            copy() if whole else pl.when(column < spec.columns)(copy)

    for begin in range(0, len(pieces), together):
        # A piece without a copy must not write its slot, either: waits count the copies.
        whole = spec.even or together > 1
        write = functools.partial(group, begin)
        write() if whole else pl.when(pieces[begin][1] < spec.columns)(write)


def _copy_piece(call: Call, slot: Any, row: Any, column: Any) -> None:
    """Begins to copy a slot to the output."""
    target = call.output.at[pl.ds(row, WGMMA_M), pl.ds(column, call.spec.part)]
    plgpu.copy_smem_to_gmem(call.shared.out_lines.at[slot], target)
