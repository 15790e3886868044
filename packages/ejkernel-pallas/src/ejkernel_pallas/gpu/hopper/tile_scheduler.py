"""The tile scheduler: which work tiles a thread block computes, in which order.

    list of work tiles   [ bundle 0: long tiles ... short tiles | bundle 1 | ... | split tiles of the tail wave ]
    thread blocks        first `blocks` of the list, one each; then `fetch_next`: an atomic counter in HBM

Heads whose keys fit into L2 together are a bundle, whose tiles are neighbours in the list. In a bundle, later tiles
come first where they are longer (causal), so that the tail wave is made of short ones. A persistent kernel has a block
per multiprocessor, which fetches the number of its next tile while it computes the last: the duration of tiles, which
may depend on segment ids, need not be known. Other kernels compute one tile per block.

Where all tiles take equally long, those of the tail wave may be split into several items of the list (split-KV).

Where blocks wait for earlier ones of their head, and later tiles are shorter, the list is folded: the blocks of a head
then start evenly.
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
from ejkernel_pallas.gpu.hopper.registers import constant, i32
from ejkernel_pallas.gpu.hopper.sizes import I32, THREADS
from ejkernel_pallas.gpu.hopper.split_tiles import WHOLE, Split

_NUMBER = plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT(()))
CACHE = 32 * 2**20
"""Bytes of L2 for what the blocks of a bundle share: their keys and values."""
# One thread adds, by a predicated instruction: behind a branch of one thread, what all threads of a warp share is no
# longer uniform to the compiler, and what copies are given stays in registers of each thread. Of an `atom.add` the
# compiler makes one addition for the warp, and waits at once to pass its result on to the other threads; not so of an
# increment.
FETCH = """{
.reg .pred leads;
setp.eq.u32 leads, $2, 0;
mov.b32 $0, 0;
@leads atom.inc.relaxed.gpu.global.u32 $0, [$1], 0x7fffffff;
}"""
STORE = """{
.reg .pred leads;
setp.eq.u32 leads, $2, 0;
@leads st.shared.b32 [$0], $1;
}"""
# All threads load the same number; the result of a reduction over the warp is uniform to the compiler, too.
LOAD = """{
.reg .b32 number;
ld.shared.b32 number, [$1];
redux.sync.max.s32 $0, number, 0xffffffff;
}"""


@dataclasses.dataclass(frozen=True)
class TileSchedule:
    """The order of work tiles, and how blocks get them.

    Attributes:
        heads: Heads of a batch row.
        tiles: Tiles of a head.
        bundle: Heads whose tiles are neighbours in the list; divides the heads of all batch rows.
        items: Length of the list: tiles of all heads, those that are split by their parts.
        blocks: Thread blocks of the grid.
        reverse: Whether later tiles are longer and come first.
        persistent: Whether blocks loop over tiles.
        folded: Whether the later half of a bundle's tiles alternates with the earlier half of the next bundle's.
        split: The last tiles of the list, each of which is several items.
    """

    heads: int
    tiles: int
    bundle: int
    items: int
    blocks: int
    reverse: bool
    persistent: bool
    folded: bool = False
    split: Split = WHOLE

    @property
    def whole(self) -> int:
        """Returns items that are a whole tile."""
        return self.items - self.split.tiles * self.split.parts


@dataclasses.dataclass(frozen=True)
class WorkTile:
    """One tile of one head, or a part of its key blocks.

    Attributes:
        batch: Batch row.
        head: Head.
        tile: Tile.
        part: Number among the parts of all tiles that are split; below zero for a whole tile.
    """

    batch: Any
    head: Any
    tile: Any
    part: Any

    def row(self, operand: Any) -> Any:
        """Returns the row of an operand that is its batch row's: its only one, where all rows share it."""
        return I32(0) if operand.shape[0] == 1 else self.batch

    def head_row(self, operand: Any, axes: int, head: Any = None) -> tuple[Any, ...]:
        """The row of an operand's second axis that is the head's, or `head`'s; none if it has not as many axes."""
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
    split: Split = WHOLE,
) -> TileSchedule:
    """Returns a plan for the device in use.

    Args:
        tiles: Tiles of a head.
        batch: Batch rows.
        heads: Heads of a batch row.
        reverse: Whether later tiles are longer.
        head_bytes: Bytes that all tiles of a head, or of `group` of them, read.
        group: Heads that read the same.
        persistent: Whether blocks loop over tiles, or compute one each.
        split: The last tiles, each of which is several items.
    """
    # A bundle divides the heads evenly, so that all bundles are alike and a number needs no table to be decoded.
    fitting = max(1, CACHE // head_bytes) * group
    bundle = max(n for n in range(1, batch * heads + 1) if batch * heads % n == 0 and n <= fitting)
    items = batch * heads * tiles + split.tiles * (split.parts - 1)
    blocks = min(multiprocessors(), items) if persistent else items
    return TileSchedule(heads, tiles, bundle, items, blocks, reverse, persistent, split=split)


def multiprocessors() -> int:
    """Returns multiprocessors of the device in use; those of an H200 where there is none."""
    device = jax.local_devices()[0]
    return device.core_count if device.platform == "gpu" else GPUS["sm_90"].multiprocessors


def counter() -> Any:
    """Returns the counter of fetched tiles, beside each block's first: in HBM, and zero when a kernel starts."""
    return pl.get_global(plgpu.SemaphoreType.REGULAR)


def whole_or_part(plan: TileSchedule, work: WorkTile, whole: Callable[[], None], part: Callable[[], None]) -> None:
    """Calls `whole` if an item is all of a tile, and else `part`."""
    if not plan.split.tiles:
        whole()
        return
    pl.when(work.part < 0)(whole)
    pl.when(work.part >= 0)(part)


def split_rows(plan: TileSchedule, size: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Where the rows of the tiles that are split belong: batch rows and heads [tiles, 1], and rows [tiles, size]."""
    first = plan.whole + plan.split.parts * jnp.arange(plan.split.tiles, dtype=jnp.int32)[:, None]
    work = item(plan, first)
    return work.batch, work.tile * size + jnp.arange(size, dtype=jnp.int32), work.head


def fetch_next(plan: TileSchedule, tile_counter: Any, place: Any) -> None:
    """One thread of the warpgroup fetches a tile's number, one beyond the last if none is left, into shared memory."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
    def add_one(_: Any, tile_counter: Any, place: Any) -> None:
        i32 = ir.IntegerType.get_signless(32)
        constant = lambda value: arith.constant(i32, ir.IntegerAttr.get(i32, value))  # noqa: E731
        with mgpu.single_thread(scope=mgpu.ThreadSubset.WARPGROUP):
            # Relaxed: the number is all that blocks exchange, and no other memory is ordered by it.
            before = llvm.atomicrmw(
                llvm.AtomicBinOp.add, mgpu.utils.memref_ptr(tile_counter), constant(1), llvm.AtomicOrdering.monotonic
            )
            # The counter starts behind the blocks' first tiles, which are their own numbers.
            memref.store(arith.addi(before, constant(plan.blocks)), place, [])

    add_one(tile_counter, place)  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def fetch_number(tile_counter: Any) -> jax.Array:
    """The counter's next number, int32, in the first thread of a warpgroup; nothing waits for it before its use."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=_NUMBER)
    def add_one(_: Any, tile_counter: Any) -> Any:
        operands = [mgpu.utils.memref_ptr(tile_counter), _thread()]
        return _splat(llvm.inline_asm(i32(), operands, FETCH, "=&r,l,r,~{memory}", has_side_effects=True))

    return add_one(tile_counter)  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def store_number(place: Any, number: Any) -> None:
    """Writes the first thread's number to shared memory, for threads that wait for a barrier at which it arrives."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(())))
    def store(_: Any, place: Any, number: Any) -> None:
        operands = [_address(place), number.registers.item(), _thread()]
        llvm.inline_asm(None, operands, STORE, "r,r,r,~{memory}", has_side_effects=True)

    store(place, number)  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def load_number(place: Any) -> jax.Array:
    """Returns the number in shared memory, int32, which is the same for all threads."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=_NUMBER)
    def load(_: Any, place: Any) -> Any:
        return _splat(llvm.inline_asm(i32(), [_address(place)], LOAD, "=r,r,~{memory}", has_side_effects=True))

    return load(place)  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def _thread() -> Any:
    """Returns a thread's number in its warpgroup."""
    return arith.remui(mgpu.utils.thread_idx(), constant(THREADS))


def _address(memory: Any) -> Any:
    return llvm.ptrtoint(i32(), mgpu.utils.memref_ptr(memory))


def _splat(value: Any) -> Any:
    return mgpu.FragmentedArray.splat(value, (), is_signed=True)


def block_range(plan: TileSchedule, table: Any, number: Any) -> tuple[Any, ...]:
    """First block, full_start, full_end and end of an item's blocks; those of any item beyond the last number."""
    # A block without a tile left reads some entry of the table, and uses none of it.
    work = item(plan, jnp.minimum(number, plan.items - 1))
    place = work.row(table), *work.head_row(table, 4), work.tile
    found = tuple(table[*place, n] for n in range(4))
    return _split_range(plan, work, *found) if plan.split.tiles else found


def _split_range(
    plan: TileSchedule, work: WorkTile, first: Any, full_start: Any, full_end: Any, last: Any
) -> tuple[Any, ...]:
    """Returns the blocks of an item, out of those of its tile."""
    whole = work.part < 0
    part = jnp.where(whole, 0, lax.rem(work.part, I32(plan.split.parts)))
    parts = jnp.where(whole, 1, I32(plan.split.parts))
    # Neighbouring parts meet exactly, whatever rounding does: one's stop is the next one's start.
    start, stop = (first + lax.div((last - first) * (part + n), parts) for n in range(2))
    return start, jnp.clip(full_start, start, stop), jnp.clip(full_end, start, stop), stop


def item(plan: TileSchedule, number: Any) -> WorkTile:
    """Returns the item with a number in the list."""
    part = number - plan.whole
    if plan.split.tiles:
        # Items behind the whole tiles are parts: so many of them are one tile of the list.
        number = jnp.minimum(number, plan.whole) + lax.div(jnp.maximum(part, 0), I32(plan.split.parts))
    number = _unfolded(plan, number) if plan.folded else number
    bundle, number = _divided(number, plan.bundle * plan.tiles)
    tile, number = _divided(number, plan.bundle)
    # Head by head within a tile: blocks that run at the same time read the same keys out of L2, if heads share them.
    batch, head = _divided(bundle * plan.bundle + number, plan.heads)
    return WorkTile(batch, head, plan.tiles - 1 - tile if plan.reverse else tile, part)


def _unfolded(plan: TileSchedule, number: Any) -> Any:
    """Returns number, in the list of one bundle after the other, of the tile that has a number in the folded list."""
    step, head = _divided(number, plan.bundle)
    later, bundles = plan.tiles // 2, plan.items // (plan.bundle * plan.tiles)
    earlier = plan.tiles - later
    period, step = _divided(step + later, plan.tiles)
    half, odd = _divided(step, 2)
    alternating = jnp.where(odd == 0, period * plan.tiles + half, (period - 1) * plan.tiles + earlier + half)
    rest = (period - 1) * plan.tiles + earlier + step
    place = jnp.where(period == 0, step - later, jnp.where(period == bundles, rest, alternating))
    return place * plan.bundle + head


def _divided(number: Any, by: int) -> tuple[Any, Any]:
    # Not `//` and `%`: numbers are not negative, and rounding towards minus infinity takes further instructions.
    return lax.div(number, I32(by)), lax.rem(number, I32(by))
