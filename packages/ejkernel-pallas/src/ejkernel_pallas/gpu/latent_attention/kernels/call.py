"""The shared memory and the constants of the latent kernel's warpgroups, and their loop over the items of a program."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
from jax import lax

from ejkernel_pallas.gpu.hopper.sizes import I32
from ejkernel_pallas.gpu.latent_attention.spec import KEYS_PER_STEP, LatentSpec, ScheduledSpec


@dataclasses.dataclass(frozen=True)
class Shared:
    """Shared memory and mbarriers. Left and right are the halves of the latent vector; [2] is the two blocks of a
    step.

    Attributes:
        query: [9, 64, 64], chunks of 64 columns of the queries, the rotary ones last.
        left: [2, 4, 64, 64], chunks of the left half of the keys, which are also values.
        right: [2, 4, 64, 64], chunks of their right half.
        rotary: [2, 64, 64] rotary columns of the keys; after the product with them, weights of the block.
        row_max: [2, 64] running maxima after each block of a step.
        row_sum: [2, 64] sums of the two warpgroups at the end of an item.
        present: [2] int32, bit n: the page of rows 8 n to 8 n + 7 exists.
        q_full: Mbarrier: queries have arrived.
        q_free: Mbarrier: no warpgroup reads them any more.
        exclusive_full: [2 * pieces] mbarriers: a piece of the left half of block 0, or of the right half of block 1,
            has arrived; only the warpgroup that scores the block reads it as values.
        shared_full: [2 * pieces] mbarriers: a piece of the other half has arrived; both warpgroups read it as values.
        rotary_full: [2] mbarriers: the rotary columns and the bits in `present` have arrived.
        exclusive_free: [2] mbarriers: the products that read the exclusive half are done.
        shared_free: [2] mbarriers: the products that read the other half are done.
        weights_full: [2] mbarriers: weights and maxima of a block have been written.
        sums_full: [2] mbarriers: sums of a warpgroup have been written.
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
    """The arguments of a launch.

    Attributes:
        spec: Constants.
        operands: References by name: query, latent, rotary, tables, items, shares.
        outputs: References to output, lse, partial outputs and their lse.
        shared: Shared memory and barriers.
    """

    spec: LatentSpec
    operands: dict[str, Any]
    outputs: Any
    shared: Shared


class ScheduledCall(Protocol):
    """The attributes of a launch that the loop over the items of a schedule reads. `operands` has the items and
    shares.
    """

    @property
    def spec(self) -> ScheduledSpec:
        """The kernel's constants."""
        ...

    @property
    def operands(self) -> dict[str, Any]:
        """References by name."""
        ...


class Item(NamedTuple):
    """A program's steps of one item.

    Attributes:
        row: Query row.
        sequence: The sequence whose keys it attends to.
        low: Its first key.
        keys: The key after its last.
        first: The program's first step, counted from key 0.
        steps: The program's number of steps.
        whole: Whether the program has all steps of the item.
        slot: The slot of the partial result otherwise.
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
    """Returns program and tile of heads of a block; the tiles of a program are consecutive blocks, and read the same
    keys.
    """
    block = lax.axis_index("block")
    return lax.div(block, I32(call.spec.tiles)), lax.rem(block, I32(call.spec.tiles))


def for_each_item(
    call: ScheduledCall, work: Callable[[Item, Any], Any], carry: Any, program_and_tile: tuple[Any, Any] | None = None
) -> Any:
    """Loops over the items of this block's program, carrying a value through `work`; `program_and_tile` is the program
    and tile.
    """
    items, shares = call.operands["items"], call.operands["shares"]
    program, tile = program_of(call) if program_and_tile is None else program_and_tile
    # Every warpgroup reads the list itself, from HBM, so that no barrier is needed to pass on items.
    begin, end = shares[program, 1], shares[program + 1, 1]

    def one(state: Any) -> Any:
        row, at, carry = state
        sequence, keys, start, steps, low = (items[row, n] for n in range(5))
        stop = jnp.minimum(end, start + steps)
        whole = (at == start) & (stop == start + steps)
        # An item that starts in this program's share is its last: its partial result goes to the second slot.
        slot = (program * 2 + (at == start).astype(I32)) * call.spec.tiles + tile
        # Steps of an item are counted from `start`; `low` may be several steps after key 0.
        first = lax.div(low, I32(KEYS_PER_STEP)) + at - start
        carry = work(Item(row, sequence, low, keys, first, stop - at, whole, slot), carry)
        return row + 1, stop, carry

    return lax.while_loop(lambda state: state[1] < end, one, (shares[program, 0], begin, carry))[2]
