"""What the warpgroups of the latent kernel share, and how they walk through the items of their program."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
from jax import lax

from ejkernel_pallas.gpu.hopper.sizes import I32
from ejkernel_pallas.gpu.latent_attention.spec import UNIT, LatentSpec, ScheduledSpec


@dataclasses.dataclass(frozen=True)
class Shared:
    """Shared memory and barriers. Left and right are the halves of the latent vector; [2] is a block of keys each.

    Attributes:
        query: [9, 64, 64], chunks of 64 columns of the queries, the rotary ones last.
        left: [2, 4, 64, 64], chunks of the left half of the keys, which are values, too.
        right: [2, 4, 64, 64], of their right half.
        rotary: [2, 64, 64] keys; after the product with them, weights of the block.
        row_max: [2, 64] running maxima after each block of a step.
        row_sum: [2, 64] sums of the two warpgroups at the end of an item.
        present: [2] int32, bit n: the page of rows 8 n to 8 n + 7 is there.
        q_full: Queries are there.
        q_free: No warpgroup reads them any more.
        exclusive_full: [2 * pieces] a piece of the left half of block 0, or of the right half of block 1, is there: as
            values, only the warpgroup that scores the block reads it.
        shared_full: [2 * pieces] a piece of the other half is there; both warpgroups read it.
        rotary_full: [2] the rotary columns and the bits in `present` are there.
        exclusive_free: [2] the products that read the exclusive half are done.
        shared_free: [2] the products that read the other half are done.
        weights_full: [2] weights and maxima of a block are there.
        sums_full: [2] sums of a warpgroup are there.
    """

    query: Any
    left: Any
    right: Any
    rotary: Any
    row_max: Any
    row_sum: Any
    present: Any
    q_full: Any
    q_free: Any
    exclusive_full: Any
    shared_full: Any
    rotary_full: Any
    exclusive_free: Any
    shared_free: Any
    weights_full: Any
    sums_full: Any


@dataclasses.dataclass(frozen=True)
class Call:
    """A launch.

    Attributes:
        spec: Constants.
        operands: References by name: query, latent, rotary, tables, items, shares.
        outputs: References to output, lse, parts and lse of parts.
        shared: Shared memory and barriers.
    """

    spec: LatentSpec
    operands: dict[str, Any]
    outputs: Any
    shared: Shared


class ScheduledCall(Protocol):
    """What walking the items of a schedule reads of a launch; `operands` has its items and shares."""

    @property
    def spec(self) -> ScheduledSpec:
        """Constants."""
        ...

    @property
    def operands(self) -> dict[str, Any]:
        """References by name."""
        ...


class Item(NamedTuple):
    """A program's steps of one item.

    Attributes:
        row: Query row.
        sequence: Whose keys it attends.
        low: Its first key.
        keys: One more than its last key.
        first: The program's first step, from key 0 on.
        steps: Its steps.
        whole: Whether these are all of the item's.
        slot: Where the part goes if not.
    """

    row: Any
    sequence: Any
    low: Any
    keys: Any
    first: Any
    steps: Any
    whole: Any
    slot: Any


def program_of(call: ScheduledCall) -> tuple[Any, Any]:
    """Returns program and tile of heads of a block: the tiles of a program are neighbours, which read the same keys."""
    block = lax.axis_index("block")
    return lax.div(block, I32(call.spec.tiles)), lax.rem(block, I32(call.spec.tiles))


def every_item(
    call: ScheduledCall, work: Callable[[Item, Any], Any], carry: Any, place: tuple[Any, Any] | None = None
) -> Any:
    """Carries a value through `work` for the items of the program of this block; `place` is its program and tile."""
    items, shares = call.operands["items"], call.operands["shares"]
    program, tile = program_of(call) if place is None else place
    # Every warpgroup walks the list by itself: the tables are read from HBM, and no barrier hands an item on.
    begin, end = shares[program, 1], shares[program + 1, 1]

    def one(state: Any) -> Any:
        row, at, carry = state
        sequence, keys, start, steps, low = (items[row, n] for n in range(5))
        stop = jnp.minimum(end, start + steps)
        whole = (at == start) & (stop == start + steps)
        # The part that an item begins with is the last of its program: the second slot.
        slot = (program * 2 + (at == start).astype(I32)) * call.spec.tiles + tile
        # Steps of an item are counted in the line from `start`; `low` may lie steps behind key 0.
        first = lax.div(low, I32(UNIT)) + at - start
        carry = work(Item(row, sequence, low, keys, first, stop - at, whole, slot), carry)
        return row + 1, stop, carry

    return lax.while_loop(lambda state: state[1] < end, one, (shares[program, 0], begin, carry))[2]
