"""Which tiles a block owns, one after the other.

In the list of all tiles, heads whose keys fit in the second-level cache together come together, and among them later
tiles come first where they are longer. Blocks that own one tile own that of their number. Others begin so, one on every
multiprocessor, and take the next tile of the list that nobody has taken: how long tiles take, which may depend on
segment ids, need not be known, and a block fetches for its next tile while it finishes the last.

Where blocks wait for earlier ones of their head, and later tiles are shorter, the list is folded: then the blocks of a
head begin evenly.
"""

import dataclasses
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref

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
        items: Tiles of all heads.
        blocks: Thread blocks of the grid.
        reverse: Whether later tiles are longer and come first.
        dealt: Whether blocks take one tile after the other.
        folded: Whether the later half of a bundle's tiles alternates with the earlier half of the next bundle's.
    """

    heads: int
    tiles: int
    bundle: int
    items: int
    blocks: int
    reverse: bool
    dealt: bool
    folded: bool = False


@dataclasses.dataclass(frozen=True)
class Item:
    """One tile of one head."""

    batch: Any
    head: Any
    tile: Any

    def row(self, operand: Any) -> Any:
        """The row of an operand that is its batch row's: its only one, where all rows share it."""
        return I32(0) if operand.shape[0] == 1 else self.batch


def make_plan(tiles: int, *, batch: int, heads: int, reverse: bool, head_bytes: int, group: int, dealt: bool) -> Plan:
    """A plan for the device in use.

    Args:
        tiles: Tiles of a head.
        batch: Batch rows.
        heads: Heads of a batch row.
        reverse: Whether later tiles are longer.
        head_bytes: Bytes that all tiles of a head, or of `group` of them, read.
        group: Heads that read the same.
        dealt: Whether blocks take one tile after the other, or own one each.
    """
    fitting = max(1, CACHE // head_bytes) * group
    bundle = max(n for n in range(1, batch * heads + 1) if batch * heads % n == 0 and n <= fitting)
    items = batch * heads * tiles
    blocks = min(multiprocessors(), items) if dealt else items
    return Plan(heads, tiles, bundle, items, blocks, reverse, dealt)


def multiprocessors() -> int:
    """Of the device in use; an H200's where there is none."""
    device = jax.local_devices()[0]
    return device.core_count if device.platform == "gpu" else 132


def counter() -> Any:
    """In device memory, and zero when a kernel starts: how many tiles were taken, apart from every block's first."""
    return pl.get_global(plgpu.SemaphoreType.REGULAR)


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
    """First, clear, unclear and last visit of the tile with a number; of any tile for a number beyond the last."""
    owned = item(plan, jnp.minimum(number, plan.items - 1))
    return tuple(table[owned.row(table), owned.tile, n] for n in range(4))


def item(plan: Plan, number: Any) -> Item:
    """The tile that has a number in the list of all."""
    number = _unfolded(plan, number) if plan.folded else number
    bundle, number = _divided(number, plan.bundle * plan.tiles)
    tile, number = _divided(number, plan.bundle)
    batch, head = _divided(bundle * plan.bundle + number, plan.heads)
    return Item(batch, head, plan.tiles - 1 - tile if plan.reverse else tile)


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
