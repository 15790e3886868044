"""The tile scheduler: assigns work tiles to thread blocks, in an order that balances them.

    list of work tiles   [ bundle 0: long tiles ... short tiles | bundle 1 | ... | split tiles of the tail wave ]
    thread blocks        the first `blocks` of the list, one each; then `fetch_next`: an atomic counter in HBM

Heads whose keys fit into L2 together form a bundle, whose tiles are consecutive in the list. In a bundle, later tiles
come first if they are longer (causal), so that the tail wave has short ones. A persistent kernel has one block per
multiprocessor, which fetches the index of its next tile while it computes the current one: the duration of tiles, which
may depend on segment ids, need not be known. Other kernels compute one tile per block.

If all tiles take equally long, those of the tail wave may be split into several items of the list (split-KV).

If blocks wait for earlier ones of their head, and later tiles are shorter, the list is folded, so that the blocks of a
head start evenly spaced.
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
from ejkernel_pallas.gpu.hopper.registers import i32, int32_constant
from ejkernel_pallas.gpu.hopper.sizes import I32, THREADS
from ejkernel_pallas.gpu.hopper.split_tiles import NO_SPLIT, TailSplit

_SCALAR_TYPE = plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT(()))
L2_BYTES = 32 * 2**20
"""Bytes of L2 for the keys and values that the blocks of a bundle share."""
# One thread increments, by a predicated instruction: after a branch of one thread, values that are uniform in a warp
# are no longer uniform to the compiler, and operands of copies stay in registers of each thread. The compiler combines
# an `atom.add` over the warp, and waits at once to broadcast its result; it does not do so with an increment.
FETCH_PTX = """{
.reg .pred leads;
setp.eq.u32 leads, $2, 0;
mov.b32 $0, 0;
@leads atom.inc.relaxed.gpu.global.u32 $0, [$1], 0x7fffffff;
}"""
STORE_PTX = """{
.reg .pred leads;
setp.eq.u32 leads, $2, 0;
@leads st.shared.b32 [$0], $1;
}"""
# All threads load the same value; the result of a warp reduction is uniform to the compiler, too.
LOAD_PTX = """{
.reg .b32 number;
ld.shared.b32 number, [$1];
redux.sync.max.s32 $0, number, 0xffffffff;
}"""


@dataclasses.dataclass(frozen=True)
class TileSchedule:
    """The order of work tiles, and their assignment to blocks.

    Attributes:
        heads: Heads per batch row.
        tiles: Tiles per head.
        bundle: Heads whose tiles are consecutive in the list; divides the heads of all batch rows.
        items: Length of the list: tiles of all heads, with split tiles counted by their parts.
        blocks: Thread blocks of the grid.
        reverse: Whether later tiles are longer and come first.
        persistent: Whether blocks loop over tiles.
        folded: Whether the later half of a bundle's tiles alternates with the earlier half of the next bundle's.
        split: The split of the list's last tiles.
    """

    heads: int
    tiles: int
    bundle: int
    items: int
    blocks: int
    reverse: bool
    persistent: bool
    folded: bool = False
    split: TailSplit = NO_SPLIT

    @property
    def num_whole_tiles(self) -> int:
        """Returns the number of items that are whole tiles."""
        return self.items - self.split.tiles * self.split.parts


@dataclasses.dataclass(frozen=True)
class WorkTile:
    """One tile of one head, or some of its key blocks.

    Attributes:
        batch: Batch row.
        head: Head.
        tile: Tile.
        part: Index among the parts of all split tiles; negative for a whole tile.
    """

    batch: Any
    head: Any
    tile: Any
    part: Any

    def row(self, operand: Any) -> Any:
        """Returns the batch row's row of an operand: row 0 if all batch rows share it."""
        return I32(0) if operand.shape[0] == 1 else self.batch

    def head_row(self, operand: Any, axes: int, head: Any = None) -> tuple[Any, ...]:
        """Returns the index of the head, or of `head`, in an operand's second axis; none if it has fewer axes."""
        if len(operand.shape) < axes:
            return ()
        return (I32(0) if operand.shape[1] == 1 else self.head if head is None else head,)


def make_plan(
    tiles: int,
    *,
    batch: int,
    heads: int,
    reverse: bool,
    head_bytes: int,
    group: int,
    persistent: bool,
    split: TailSplit = NO_SPLIT,
) -> TileSchedule:
    """Returns the schedule for the device in use.

    Args:
        tiles: Tiles per head.
        batch: Batch rows.
        heads: Heads per batch row.
        reverse: Whether later tiles are longer.
        head_bytes: Bytes that the tiles of a head, or of `group` heads, read.
        group: Heads that share what they read.
        persistent: Whether blocks loop over tiles, or compute one each.
        split: The split of the last tiles.
    """
    # A bundle divides the heads evenly, so that all bundles are alike and an index is decoded without a table.
    heads_in_l2 = max(1, L2_BYTES // head_bytes) * group
    bundle = max(n for n in range(1, batch * heads + 1) if batch * heads % n == 0 and n <= heads_in_l2)
    items = batch * heads * tiles + split.tiles * (split.parts - 1)
    blocks = min(multiprocessors(), items) if persistent else items
    return TileSchedule(heads, tiles, bundle, items, blocks, reverse, persistent, split=split)


def multiprocessors() -> int:
    """Returns the multiprocessors of the device in use; those of an H200 without a device."""
    device = jax.local_devices()[0]
    return device.core_count if device.platform == "gpu" else GPUS["sm_90"].multiprocessors


def make_tile_counter() -> Any:
    """Returns the counter of fetched tiles, not counting each block's first: in HBM, and zero when a kernel starts."""
    return pl.get_global(plgpu.SemaphoreType.REGULAR)


def run_whole_or_split_tile(
    plan: TileSchedule, work: WorkTile, whole: Callable[[], None], part: Callable[[], None]
) -> None:
    """Calls `whole` if an item is a whole tile, and `part` otherwise."""
    if not plan.split.tiles:
        whole()
        return
    pl.when(work.part < 0)(whole)
    pl.when(work.part >= 0)(part)


def locate_split_rows(plan: TileSchedule, size: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the position of the split tiles' rows: batch rows and heads [tiles, 1], and rows [tiles, size]."""
    first = plan.num_whole_tiles + plan.split.parts * jnp.arange(plan.split.tiles, dtype=jnp.int32)[:, None]
    work = work_tile(plan, first)
    return work.batch, work.tile * size + jnp.arange(size, dtype=jnp.int32), work.head


def fetch_next(plan: TileSchedule, tile_counter: Any, target: Any) -> None:
    """Stores the index of the next tile in shared memory, by one thread; an index past the end if none is left."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
    def add_one(_: Any, tile_counter: Any, target: Any) -> None:
        i32 = ir.IntegerType.get_signless(32)
        int32_constant = lambda value: arith.constant(i32, ir.IntegerAttr.get(i32, value))  # noqa: E731
        with mgpu.single_thread(scope=mgpu.ThreadSubset.WARPGROUP):
            # Relaxed: blocks exchange only the index, and no other memory accesses depend on it.
            before = llvm.atomicrmw(
                llvm.AtomicBinOp.add,
                mgpu.utils.memref_ptr(tile_counter),
                int32_constant(1),
                llvm.AtomicOrdering.monotonic,
            )
            # The counter starts after the blocks' first tiles, whose indices are the blocks'.
            memref.store(arith.addi(before, int32_constant(plan.blocks)), target, [])

    add_one(tile_counter, target)  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def fetch_tile_index(tile_counter: Any) -> jax.Array:
    """Returns the counter's next index, int32, in the first thread of a warpgroup, without waiting for it."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=_SCALAR_TYPE)
    def add_one(_: Any, tile_counter: Any) -> Any:
        operands = [mgpu.utils.memref_ptr(tile_counter), _thread_index()]
        return _splat(llvm.inline_asm(i32(), operands, FETCH_PTX, "=&r,l,r,~{memory}", has_side_effects=True))

    return add_one(tile_counter)  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def store_tile_index(target: Any, number: Any) -> None:
    """Stores the first thread's index in shared memory, for threads that wait for an mbarrier at which it arrives."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(())))
    def store(_: Any, target: Any, number: Any) -> None:
        operands = [_address(target), number.registers.item(), _thread_index()]
        llvm.inline_asm(None, operands, STORE_PTX, "r,r,r,~{memory}", has_side_effects=True)

    store(target, number)  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def load_tile_index(source: Any) -> jax.Array:
    """Loads an index from shared memory, int32, uniform over the threads."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=_SCALAR_TYPE)
    def load(_: Any, source: Any) -> Any:
        return _splat(llvm.inline_asm(i32(), [_address(source)], LOAD_PTX, "=r,r,~{memory}", has_side_effects=True))

    return load(source)  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def _thread_index() -> Any:
    """Returns a thread's index in its warpgroup."""
    return arith.remui(mgpu.utils.thread_idx(), int32_constant(THREADS))


def _address(memory: Any) -> Any:
    return llvm.ptrtoint(i32(), mgpu.utils.memref_ptr(memory))


def _splat(value: Any) -> Any:
    return mgpu.FragmentedArray.splat(value, (), is_signed=True)


def block_range(plan: TileSchedule, table: Any, number: Any) -> tuple[Any, ...]:
    """Returns first block, full_start, full_end and end of an item's blocks. Past the last item the values are
    unspecified.
    """
    # A block without a tile reads some entry of the table, and does not use it.
    work = work_tile(plan, jnp.minimum(number, plan.items - 1))
    table_index = work.row(table), *work.head_row(table, 4), work.tile
    bounds = tuple(table[*table_index, n] for n in range(4))
    return _split_range(plan, work, *bounds) if plan.split.tiles else bounds


def _split_range(
    plan: TileSchedule, work: WorkTile, first: Any, full_start: Any, full_end: Any, last: Any
) -> tuple[Any, ...]:
    """Returns the blocks of an item, from those of its tile."""
    whole = work.part < 0
    part = jnp.where(whole, 0, lax.rem(work.part, I32(plan.split.parts)))
    parts = jnp.where(whole, 1, I32(plan.split.parts))
    # Neighbouring parts are contiguous for any rounding: the stop of one is the start of the next.
    start, stop = (first + lax.div((last - first) * (part + n), parts) for n in range(2))
    return start, jnp.clip(full_start, start, stop), jnp.clip(full_end, start, stop), stop


def work_tile(plan: TileSchedule, number: Any) -> WorkTile:
    """Returns the item with an index in the list."""
    part = number - plan.num_whole_tiles
    if plan.split.tiles:
        # Items after the whole tiles are parts: `parts` of them are one tile of the list.
        number = jnp.minimum(number, plan.num_whole_tiles) + lax.div(jnp.maximum(part, 0), I32(plan.split.parts))
    number = _unfold_index(plan, number) if plan.folded else number
    bundle, number = _divide(number, plan.bundle * plan.tiles)
    tile, number = _divide(number, plan.bundle)
    # Head by head within a tile: blocks that run at the same time read the same keys from L2, if heads share them.
    batch, head = _divide(bundle * plan.bundle + number, plan.heads)
    return WorkTile(batch, head, plan.tiles - 1 - tile if plan.reverse else tile, part)


def _unfold_index(plan: TileSchedule, number: Any) -> Any:
    """Returns the index, in the list of consecutive bundles, of the tile with an index in the folded list."""
    step, head = _divide(number, plan.bundle)
    later_tiles, num_bundles = plan.tiles // 2, plan.items // (plan.bundle * plan.tiles)
    earlier_tiles = plan.tiles - later_tiles
    bundle_period, step = _divide(step + later_tiles, plan.tiles)
    half, odd = _divide(step, 2)
    alternating_index = jnp.where(
        odd == 0, bundle_period * plan.tiles + half, (bundle_period - 1) * plan.tiles + earlier_tiles + half
    )
    last_index = (bundle_period - 1) * plan.tiles + earlier_tiles + step
    tile_index = jnp.where(
        bundle_period == 0, step - later_tiles, jnp.where(bundle_period == num_bundles, last_index, alternating_index)
    )
    return tile_index * plan.bundle + head


def _divide(number: Any, by: int) -> tuple[Any, Any]:
    # Not `//` and `%`: indices are not negative, and rounding towards minus infinity takes more instructions.
    return lax.div(number, I32(by)), lax.rem(number, I32(by))
