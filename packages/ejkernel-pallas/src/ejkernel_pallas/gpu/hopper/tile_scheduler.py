"""Which tiles a block owns, one after the other.

In the list of all tiles, heads whose keys fit in the second-level cache together come together, and among them later
tiles come first where they are longer. Blocks that own one tile own that of their number. Others begin so, one on every
multiprocessor, and take the next tile of the list that nobody has taken: how long tiles take, which may depend on
segment ids, need not be known, and a block fetches for its next tile while it finishes the last.

Where all tiles are equally long, the last ones may be several items of the list, with a part of the visits each.

Where blocks wait for earlier ones of their head, and later tiles are shorter, the list is folded: then the blocks of a
head begin evenly.
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

from ejkernel_pallas.gpu.hopper.split_tiles import WHOLE, Split

I32 = jnp.int32
CACHE = 32 * 2**20
"""Bytes of keys and values, or of what else the blocks of a bundle share, that the second-level cache is to hold."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """How tiles are dealt.

    Attributes:
        heads: Heads of a batch row.
        tiles: Tiles of a head.
        bundle: Heads whose tiles are worked on together; divides the heads of all batch rows.
        items: Length of the list: tiles of all heads, those that are split by their parts.
        blocks: Thread blocks of the grid.
        reverse: Whether later tiles are longer and come first.
        dealt: Whether blocks take one tile after the other.
        folded: Whether the later half of a bundle's tiles alternates with the earlier half of the next bundle's.
        split: The last tiles of the list, each of which is several items.
    """

    heads: int
    tiles: int
    bundle: int
    items: int
    blocks: int
    reverse: bool
    dealt: bool
    folded: bool = False
    split: Split = WHOLE

    @property
    def whole(self) -> int:
        """Items that are all of a tile."""
        return self.items - self.split.tiles * self.split.parts


@dataclasses.dataclass(frozen=True)
class Item:
    """One tile of one head, or a part of its visits.

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
        """The row of an operand that is its batch row's: its only one, where all rows share it."""
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
    dealt: bool,
    split: Split = WHOLE,
) -> Plan:
    """A plan for the device in use.

    Args:
        tiles: Tiles of a head.
        batch: Batch rows.
        heads: Heads of a batch row.
        reverse: Whether later tiles are longer.
        head_bytes: Bytes that all tiles of a head, or of `group` of them, read.
        group: Heads that read the same.
        dealt: Whether blocks take one tile after the other, or own one each.
        split: The last tiles, each of which is several items.
    """
    fitting = max(1, CACHE // head_bytes) * group
    bundle = max(n for n in range(1, batch * heads + 1) if batch * heads % n == 0 and n <= fitting)
    items = batch * heads * tiles + split.tiles * (split.parts - 1)
    blocks = min(multiprocessors(), items) if dealt else items
    return Plan(heads, tiles, bundle, items, blocks, reverse, dealt, split=split)


def multiprocessors() -> int:
    """Of the device in use; an H200's where there is none."""
    device = jax.local_devices()[0]
    return device.core_count if device.platform == "gpu" else 132


def counter() -> Any:
    """In device memory, and zero when a kernel starts: how many tiles were taken, apart from every block's first."""
    return pl.get_global(plgpu.SemaphoreType.REGULAR)


def whole_or_part(plan: Plan, owned: Item, whole: Callable[[], None], part: Callable[[], None]) -> None:
    """Calls `whole` if an item is all of a tile, and else `part`."""
    if not plan.split.tiles:
        whole()
        return
    pl.when(owned.part < 0)(whole)
    pl.when(owned.part >= 0)(part)


def split_rows(plan: Plan, size: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Where the rows of the tiles that are split belong: batch rows and heads [tiles, 1], and rows [tiles, size]."""
    first = plan.whole + plan.split.parts * jnp.arange(plan.split.tiles, dtype=jnp.int32)[:, None]
    owned = item(plan, first)
    return owned.batch, owned.tile * size + jnp.arange(size, dtype=jnp.int32), owned.head


def take(plan: Plan, taken: Any, place: Any) -> None:
    """One thread of the warpgroup takes a tile, and writes its number, or one beyond the last, to shared memory."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
    def add_one(_: Any, taken: Any, place: Any) -> None:
        i32 = ir.IntegerType.get_signless(32)
        constant = lambda value: arith.constant(i32, ir.IntegerAttr.get(i32, value))  # noqa: E731
        with mgpu.single_thread(scope=mgpu.ThreadSubset.WARPGROUP):
            before = llvm.atomicrmw(
                llvm.AtomicBinOp.add, mgpu.utils.memref_ptr(taken), constant(1), llvm.AtomicOrdering.monotonic
            )
            memref.store(arith.addi(before, constant(plan.blocks)), place, [])

    add_one(taken, place)  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def visits(plan: Plan, table: Any, number: Any) -> tuple[Any, ...]:
    """First, clear, unclear and last visit of the item with a number; of any item for a number beyond the last."""
    owned = item(plan, jnp.minimum(number, plan.items - 1))
    place = owned.row(table), *owned.head_row(table, 4), owned.tile
    found = tuple(table[*place, n] for n in range(4))
    return _shared(plan, owned, *found) if plan.split.tiles else found


def _shared(plan: Plan, owned: Item, first: Any, clear: Any, unclear: Any, last: Any) -> tuple[Any, ...]:
    """Of a tile's visits those of an item."""
    whole = owned.part < 0
    part = jnp.where(whole, 0, lax.rem(owned.part, I32(plan.split.parts)))
    parts = jnp.where(whole, 1, I32(plan.split.parts))
    start, stop = (first + lax.div((last - first) * (part + n), parts) for n in range(2))
    return start, jnp.clip(clear, start, stop), jnp.clip(unclear, start, stop), stop


def item(plan: Plan, number: Any) -> Item:
    """What has a number in the list of all."""
    part = number - plan.whole
    if plan.split.tiles:
        number = jnp.minimum(number, plan.whole) + lax.div(jnp.maximum(part, 0), I32(plan.split.parts))
    number = _unfolded(plan, number) if plan.folded else number
    bundle, number = _divided(number, plan.bundle * plan.tiles)
    tile, number = _divided(number, plan.bundle)
    batch, head = _divided(bundle * plan.bundle + number, plan.heads)
    return Item(batch, head, plan.tiles - 1 - tile if plan.reverse else tile, part)


def _unfolded(plan: Plan, number: Any) -> Any:
    """Number, in the list of one bundle after the other, of the tile that has a number in the folded list."""
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
    return lax.div(number, I32(by)), lax.rem(number, I32(by))
