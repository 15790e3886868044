"""The tile scheduler: assigns work tiles to thread blocks, in an order that balances them.

    list of work tiles   [ bundle 0: long tiles ... short tiles | bundle 1 | ... | split tiles of the tail wave ]
    thread blocks        the first `blocks` of the list, one each; then by an atomic counter in HBM

Heads whose keys fit into L2 together form a bundle, whose tiles are consecutive in the list. In a bundle, later tiles
come first if they are longer (causal), so that the tail wave has short ones. A persistent kernel has one block per
multiprocessor, which fetches the index of its next tile while it computes the current one: the duration of tiles, which
may depend on segment ids, need not be known. Other kernels compute one tile per block.

If all tiles take equally long, those of the tail wave may be split into several items of the list (split-KV).

If blocks wait for earlier ones of their head, and later tiles are shorter, the tiles of successive bundles are
interleaved, so that the blocks of a head start evenly spaced.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref

from ejkernel.ops.chips import GPUS
from ejkernel_pallas.gpu.hopper.registers import int32_constant, int32_type
from ejkernel_pallas.gpu.hopper.sizes import I32, THREADS_PER_WARPGROUP
from ejkernel_pallas.gpu.hopper.split_tiles import NO_SPLIT, TailSplit

_UNIFORM_INT32 = plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT(()))
L2_BYTES_PER_BUNDLE = 32 * 2**20
"""Bytes of L2 for the keys and values that the blocks of a bundle share."""
# One thread increments, by a predicated instruction: after a branch of one thread, values that are uniform in a warp
# are no longer uniform to the compiler, and operands of copies stay in registers of each thread. The compiler combines
# an `atom.add` over the warp, and waits at once to broadcast its result; it does not do so with an increment.
FETCH_TILE_INDEX_PTX = """{
.reg .pred leads;
setp.eq.u32 leads, $2, 0;
mov.b32 $0, 0;
@leads atom.inc.relaxed.gpu.global.u32 $0, [$1], 0x7fffffff;
}"""
STORE_TILE_INDEX_PTX = """{
.reg .pred leads;
setp.eq.u32 leads, $2, 0;
@leads st.shared.b32 [$0], $1;
}"""
# All threads load the same value; the result of a warp reduction is uniform to the compiler, too.
LOAD_TILE_INDEX_PTX = """{
.reg .b32 number;
ld.shared.b32 number, [$1];
redux.sync.max.s32 $0, number, 0xffffffff;
}"""


@dataclasses.dataclass(frozen=True)
class TileSchedule:
    """The order of work tiles, and their assignment to blocks.

    Attributes:
        heads_per_batch_row: Heads per batch row.
        tiles_per_head: Tiles per head.
        heads_per_bundle: Heads whose tiles are consecutive in the list; divides the heads of all batch rows.
        num_items: Length of the list: tiles of all heads, with split tiles counted by their parts.
        num_blocks: Thread blocks of the grid.
        reverses_tiles: Whether later tiles are longer and come first.
        is_persistent: Whether blocks loop over tiles.
        interleaves_bundles: Whether the later half of a bundle's tiles alternates with the next bundle's earlier half.
        tail_split: The split of the list's last tiles.
    """

    heads_per_batch_row: int
    tiles_per_head: int
    heads_per_bundle: int
    num_items: int
    num_blocks: int
    reverses_tiles: bool
    is_persistent: bool
    interleaves_bundles: bool = False
    tail_split: TailSplit = NO_SPLIT

    @property
    def num_whole_tiles(self) -> int:
        """Returns the number of items that are whole tiles."""
        return self.num_items - self.tail_split.num_split_tiles * self.tail_split.splits_per_tile


@dataclasses.dataclass(frozen=True)
class WorkTile:
    """One tile of one head, or some of its key blocks.

    Attributes:
        batch_row: Batch row.
        head: Head.
        tile_in_head: Tile.
        split_index: Index among the parts of all split tiles; negative for a whole tile.
    """

    batch_row: Any
    head: Any
    tile_in_head: Any
    split_index: Any

    def batch_row_of(self, operand: Any) -> Any:
        """Returns the batch row's row of an operand: row 0 if all batch rows share it."""
        return I32(0) if operand.shape[0] == 1 else self.batch_row

    def head_index_of(self, operand: Any, num_axes: int, head: Any = None) -> tuple[Any, ...]:
        """Returns the index of the head, or of `head`, in an operand's second axis; none if it has fewer axes."""
        if len(operand.shape) < num_axes:
            return ()
        return (I32(0) if operand.shape[1] == 1 else self.head if head is None else head,)


def make_tile_schedule(
    tiles_per_head: int,
    *,
    batch_size: int,
    heads_per_batch_row: int,
    reverses_tiles: bool,
    head_bytes: int,
    heads_per_group: int,
    is_persistent: bool,
    tail_split: TailSplit = NO_SPLIT,
) -> TileSchedule:
    """Returns the schedule for the device in use.

    Args:
        tiles_per_head: Tiles per head.
        batch_size: Batch rows.
        heads_per_batch_row: Heads per batch row.
        reverses_tiles: Whether later tiles are longer.
        head_bytes: Bytes that the tiles of a head, or of `heads_per_group` heads, read.
        heads_per_group: Heads that share what they read.
        is_persistent: Whether blocks loop over tiles, or compute one each.
        tail_split: The split of the last tiles.
    """
    # A bundle divides the heads evenly, so that all bundles are alike and an index is decoded without a table.
    heads_in_l2 = max(1, L2_BYTES_PER_BUNDLE // head_bytes) * heads_per_group
    bundle = max(
        n
        for n in range(1, batch_size * heads_per_batch_row + 1)
        if batch_size * heads_per_batch_row % n == 0 and n <= heads_in_l2
    )
    items = batch_size * heads_per_batch_row * tiles_per_head + tail_split.num_split_tiles * (
        tail_split.splits_per_tile - 1
    )
    blocks = min(num_multiprocessors(), items) if is_persistent else items
    return TileSchedule(
        heads_per_batch_row, tiles_per_head, bundle, items, blocks, reverses_tiles, is_persistent, tail_split=tail_split
    )


def num_multiprocessors() -> int:
    """Returns the multiprocessors of the device in use; those of an H200 without a device."""
    device = jax.local_devices()[0]
    return device.core_count if device.platform == "gpu" else GPUS["sm_90"].multiprocessors


def make_tile_counter() -> Any:
    """Returns the counter of fetched tiles, not counting each block's first: in HBM, and zero when a kernel starts."""
    return pl.get_global(plgpu.SemaphoreType.REGULAR)


def run_whole_or_split_tile(
    schedule: TileSchedule, work_tile: WorkTile, run_whole: Callable[[], None], run_split: Callable[[], None]
) -> None:
    """Calls `run_whole` if an item is a whole tile, and `run_split` otherwise."""
    if not schedule.tail_split.num_split_tiles:
        run_whole()
        return
    pl.when(work_tile.split_index < 0)(run_whole)
    pl.when(work_tile.split_index >= 0)(run_split)


def output_indices_of_split_tiles(schedule: TileSchedule, rows_per_tile: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the indices in the output of the rows of all split tiles: batch rows [tiles, 1], rows [tiles,
    rows_per_tile] and heads [tiles, 1].
    """
    first = (
        schedule.num_whole_tiles
        + schedule.tail_split.splits_per_tile
        * jnp.arange(schedule.tail_split.num_split_tiles, dtype=jnp.int32)[:, None]
    )
    work = locate_work_tile(schedule, first)
    return work.batch_row, work.tile_in_head * rows_per_tile + jnp.arange(rows_per_tile, dtype=jnp.int32), work.head


def fetch_and_store_tile_index(schedule: TileSchedule, tile_counter: Any, target: Any) -> None:
    """Stores the index of the next tile in shared memory, by one thread; an index past the end if none is left."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
    def increment_tile_counter(_: Any, tile_counter: Any, target: Any) -> None:
        int32_type = ir.IntegerType.get_signless(32)
        int32_constant = lambda value: arith.constant(int32_type, ir.IntegerAttr.get(int32_type, value))  # noqa: E731
        with mgpu.single_thread(scope=mgpu.ThreadSubset.WARPGROUP):
            # Relaxed: blocks exchange only the index, and no other memory accesses depend on it.
            before = llvm.atomicrmw(
                llvm.AtomicBinOp.add,
                mgpu.utils.memref_ptr(tile_counter),
                int32_constant(1),
                llvm.AtomicOrdering.monotonic,
            )
            # The counter starts after the blocks' first tiles, whose indices are the blocks'.
            memref.store(arith.addi(before, int32_constant(schedule.num_blocks)), target, [])

    increment_tile_counter(tile_counter, target)  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def fetch_tile_index(tile_counter: Any) -> jax.Array:
    """Returns the counter's next index, int32, in the first thread of a warpgroup, without waiting for it."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=_UNIFORM_INT32)
    def increment_tile_counter(_: Any, tile_counter: Any) -> Any:
        operands = [mgpu.utils.memref_ptr(tile_counter), _thread_index()]
        return _uniform_scalar(
            llvm.inline_asm(int32_type(), operands, FETCH_TILE_INDEX_PTX, "=&r,l,r,~{memory}", has_side_effects=True)
        )

    return increment_tile_counter(tile_counter)  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def store_tile_index(target: Any, tile_index: Any) -> None:
    """Stores the first thread's index in shared memory, for threads that wait for an mbarrier at which it arrives."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(())))
    def store(_: Any, target: Any, tile_index: Any) -> None:
        operands = [_shared_address(target), tile_index.registers.item(), _thread_index()]
        llvm.inline_asm(None, operands, STORE_TILE_INDEX_PTX, "r,r,r,~{memory}", has_side_effects=True)

    store(target, tile_index)  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def load_tile_index(source: Any) -> jax.Array:
    """Loads an index from shared memory, int32, uniform over the threads."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=_UNIFORM_INT32)
    def load(_: Any, source: Any) -> Any:
        return _uniform_scalar(
            llvm.inline_asm(
                int32_type(), [_shared_address(source)], LOAD_TILE_INDEX_PTX, "=r,r,~{memory}", has_side_effects=True
            )
        )

    return load(source)  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def _thread_index() -> Any:
    """Returns a thread's index in its warpgroup."""
    return arith.remui(mgpu.utils.thread_idx(), int32_constant(THREADS_PER_WARPGROUP))


def _shared_address(memory: Any) -> Any:
    return llvm.ptrtoint(int32_type(), mgpu.utils.memref_ptr(memory))


def _uniform_scalar(value: Any) -> Any:
    return mgpu.FragmentedArray.splat(value, (), is_signed=True)


def block_bounds(schedule: TileSchedule, block_range_table: Any, item_index: Any) -> tuple[Any, ...]:
    """Returns first block, full_start, full_end and end of an item's blocks. Past the last item the values are
    unspecified.
    """
    # A block without a tile reads some entry of the table, and does not use it.
    work = locate_work_tile(schedule, jnp.minimum(item_index, schedule.num_items - 1))
    table_index = work.batch_row_of(block_range_table), *work.head_index_of(block_range_table, 4), work.tile_in_head
    bounds = tuple(block_range_table[*table_index, n] for n in range(4))
    return _split_block_bounds(schedule, work, *bounds) if schedule.tail_split.num_split_tiles else bounds


def _split_block_bounds(
    schedule: TileSchedule, work_tile: WorkTile, first_block: Any, full_start: Any, full_end: Any, end_block: Any
) -> tuple[Any, ...]:
    """Returns the blocks of an item, from those of its tile."""
    whole = work_tile.split_index < 0
    part = jnp.where(whole, 0, lax.rem(work_tile.split_index, I32(schedule.tail_split.splits_per_tile)))
    parts = jnp.where(whole, 1, I32(schedule.tail_split.splits_per_tile))
    # Neighbouring parts are contiguous for any rounding: the stop of one is the start of the next.
    start, stop = (first_block + lax.div((end_block - first_block) * (part + n), parts) for n in range(2))
    return start, jnp.clip(full_start, start, stop), jnp.clip(full_end, start, stop), stop


def locate_work_tile(schedule: TileSchedule, item_index: Any) -> WorkTile:
    """Returns the item with an index in the list."""
    part = item_index - schedule.num_whole_tiles
    if schedule.tail_split.num_split_tiles:
        # Items after the whole tiles are parts: `parts` of them are one tile of the list.
        item_index = jnp.minimum(item_index, schedule.num_whole_tiles) + lax.div(
            jnp.maximum(part, 0), I32(schedule.tail_split.splits_per_tile)
        )
    item_index = _undo_bundle_interleaving(schedule, item_index) if schedule.interleaves_bundles else item_index
    bundle, item_index = _divide_with_remainder(item_index, schedule.heads_per_bundle * schedule.tiles_per_head)
    tile, item_index = _divide_with_remainder(item_index, schedule.heads_per_bundle)
    # Head by head within a tile: blocks that run at the same time read the same keys from L2, if heads share them.
    batch, head = _divide_with_remainder(bundle * schedule.heads_per_bundle + item_index, schedule.heads_per_batch_row)
    return WorkTile(batch, head, schedule.tiles_per_head - 1 - tile if schedule.reverses_tiles else tile, part)


def _undo_bundle_interleaving(schedule: TileSchedule, interleaved_index: Any) -> Any:
    """Returns the index, in the list of consecutive bundles, of the tile with an index in the interleaved list."""
    step, head = _divide_with_remainder(interleaved_index, schedule.heads_per_bundle)
    later_tiles, num_bundles = (
        schedule.tiles_per_head // 2,
        schedule.num_items // (schedule.heads_per_bundle * schedule.tiles_per_head),
    )
    earlier_tiles = schedule.tiles_per_head - later_tiles
    bundle_period, step = _divide_with_remainder(step + later_tiles, schedule.tiles_per_head)
    half, odd = _divide_with_remainder(step, 2)
    alternating_index = jnp.where(
        odd == 0,
        bundle_period * schedule.tiles_per_head + half,
        (bundle_period - 1) * schedule.tiles_per_head + earlier_tiles + half,
    )
    last_index = (bundle_period - 1) * schedule.tiles_per_head + earlier_tiles + step
    tile_index = jnp.where(
        bundle_period == 0, step - later_tiles, jnp.where(bundle_period == num_bundles, last_index, alternating_index)
    )
    return tile_index * schedule.heads_per_bundle + head


def _divide_with_remainder(dividend: Any, divisor: int) -> tuple[Any, Any]:
    # Not `//` and `%`: indices are not negative, and rounding towards minus infinity takes more instructions.
    return lax.div(dividend, I32(divisor)), lax.rem(dividend, I32(divisor))
