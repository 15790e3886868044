"""Which tiles a block owns, one after the other.

In the list of all tiles, heads whose keys fit in the second-level cache together come together, and among them the
longest tiles come first. Where it is known when a call is traced how long each tile takes, there is a block for every
multiprocessor, and tiles are dealt in the order of the list, each to the block that is done first: a block fetches for
its next tile while it finishes the last. Otherwise every tile has a block of its own, and the device deals.
"""

import dataclasses
import functools
import heapq
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

I32 = jnp.int32
CACHE = 32 * 2**20
"""Bytes of keys and values, or of what else the blocks of a bundle share, that the second-level cache is to hold."""
START = 2
"""What it costs to begin and to finish a tile, in visits."""
MOST = 2**17
"""Tiles that are dealt when a call is traced."""


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
        dealt: Whether blocks own more than one tile.
        shared: Whether one table of visits serves all batch rows.
    """

    heads: int
    tiles: int
    bundle: int
    items: int
    blocks: int
    reverse: bool
    dealt: bool
    shared: bool


@dataclasses.dataclass(frozen=True)
class Item:
    """One tile of one head."""

    batch: Any
    head: Any
    tile: Any


def make_plan(
    visits: Any, *, batch: int, heads: int, reverse: bool, head_bytes: int, group: int, dealt: bool
) -> tuple[Plan, Any]:
    """A plan for the device in use, and the table that its kernel reads.

    Args:
        visits: Table of visits, [B|1, tiles, 4]; a NumPy array where it is known when the call is traced.
        batch: Batch rows.
        heads: Heads of a batch row.
        reverse: Whether later tiles are longer.
        head_bytes: Bytes that all tiles of a head, or of `group` of them, read.
        group: Heads that read the same.
        dealt: Whether to deal tiles if it is known how long they take.
    """
    tiles, shared = visits.shape[1], visits.shape[0] == 1
    fitting = max(1, CACHE // head_bytes) * group
    bundle = max(n for n in range(1, batch * heads + 1) if batch * heads % n == 0 and n <= fitting)
    items = batch * heads * tiles
    dealt = dealt and shared and isinstance(visits, np.ndarray) and items <= MOST
    blocks = min(multiprocessors(), items) if dealt else items
    plan = Plan(heads, tiles, bundle, items, blocks, reverse, dealt, shared)
    return plan, jnp.asarray(_deal(plan, visits.tobytes()) if dealt else visits)


def multiprocessors() -> int:
    """Of the device in use; an H200's where there is none."""
    device = jax.local_devices()[0]
    return device.core_count if device.platform == "gpu" else 132


def count(plan: Plan, table: Any) -> Any:
    """Tiles that this block owns."""
    return table[lax.axis_index("block"), 0, 5] if plan.dealt else I32(1)


def work(plan: Plan, table: Any, turn: Any) -> tuple[Any, ...]:
    """Number of the tile that this block owns in a turn, and its visits: first, clear, unclear, last."""
    block = lax.axis_index("block")
    if plan.dealt:
        return tuple(table[block, turn, n] for n in range(5))
    owned = item(plan, block)
    return block, *(table[0 if plan.shared else owned.batch, owned.tile, n] for n in range(4))


def item(plan: Plan, number: Any) -> Item:
    """The tile that has a number in the list of all."""
    bundle, number = _divided(number, plan.bundle * plan.tiles)
    tile, number = _divided(number, plan.bundle)
    batch, head = _divided(bundle * plan.bundle + number, plan.heads)
    return Item(batch, head, plan.tiles - 1 - tile if plan.reverse else tile)


def _divided(number: Any, by: int) -> tuple[Any, Any]:
    return lax.div(number, I32(by)), lax.rem(number, I32(by))


@functools.lru_cache(maxsize=64)
def _deal(plan: Plan, visits: bytes) -> np.ndarray:
    """What every block owns: int32 [blocks, turns + 1, 6], number, visits, and how many there are.

    A turn after the last is there to be read: kernels look one ahead.
    """
    table = np.frombuffer(visits, np.int32).reshape(plan.tiles, 4)
    tile = np.arange(plan.items) // plan.bundle % plan.tiles
    tile = plan.tiles - 1 - tile if plan.reverse else tile
    costs = (table[:, 3] - table[:, 0] + START)[tile].tolist()
    done, hands = [(0, block) for block in range(plan.blocks)], [[] for _ in range(plan.blocks)]
    for number, cost in enumerate(costs):
        load, block = done[0]
        hands[block].append(number)
        heapq.heapreplace(done, (load + cost, block))
    dealt = np.zeros((plan.blocks, max(map(len, hands)) + 1, 6), np.int32)
    for block, hand in enumerate(hands):
        dealt[block, : len(hand), 0] = hand
        dealt[block, :, 5] = len(hand)
    dealt[:, :, 1:5] = table[tile[dealt[:, :, 0]]]
    return dealt
