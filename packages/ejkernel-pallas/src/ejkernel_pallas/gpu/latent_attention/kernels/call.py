"""The shared memory and the constants of the latent kernel's warpgroups, and their loop over the items of a program."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
from jax import lax

from ejkernel_pallas.gpu.hopper.sizes import I32
from ejkernel_pallas.gpu.latent_attention.spec import KEYS_PER_STEP, LatentSpec, ScheduledSpec


@dataclasses.dataclass(frozen=True)
class SharedMemory:
    """Shared memory and mbarriers. Left and right are the halves of the latent vector; [2] is the two blocks of a
    step.

    Attributes:
        query_chunks: [9, 64, 64], chunks of 64 columns of the queries, the rotary ones last.
        key_left_half_chunks: [2, 4, 64, 64], chunks of the left half of the keys, which are also values.
        key_right_half_chunks: [2, 4, 64, 64], chunks of their right half.
        rotary_columns: [2, 64, 64] rotary columns of the keys; after the product with them, weights of the block.
        row_max: [2, 64] running maxima after each block of a step.
        row_sum: [2, 64] sums of the two warpgroups at the end of an item.
        valid_key_bits: [2] int32, bit n: the page of rows 8 n to 8 n + 7 exists.
        q_full: Mbarrier: queries have arrived.
        q_free: Mbarrier: no warpgroup reads them any more.
        half_read_by_one_warpgroup_full: [2 * pieces] mbarriers: a piece of the left half of block 0, or of the right
            half of block 1, has arrived; only the warpgroup that scores the block reads it as values.
        half_read_by_both_warpgroups_full: [2 * pieces] mbarriers: a piece of the other half has arrived; both
            warpgroups read it as values.
        rotary_full: [2] mbarriers: the rotary columns and the bits in `valid_key_bits` have arrived.
        half_read_by_one_warpgroup_free: [2] mbarriers: the products that read the exclusive half are done.
        half_read_by_both_warpgroups_free: [2] mbarriers: the products that read the other half are done.
        weights_full: [2] mbarriers: weights and maxima of a block have been written.
        row_sums_full: [2] mbarriers: sums of a warpgroup have been written.
    """

    query_chunks: Any
    key_left_half_chunks: Any
    key_right_half_chunks: Any
    rotary_columns: Any
    row_max: Any
    row_sum: Any
    valid_key_bits: Any
    q_full: Any
    q_free: Any
    half_read_by_one_warpgroup_full: Any
    half_read_by_both_warpgroups_full: Any
    rotary_full: Any
    half_read_by_one_warpgroup_free: Any
    half_read_by_both_warpgroups_free: Any
    weights_full: Any
    row_sums_full: Any


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
    shared: SharedMemory


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


class WorkItem(NamedTuple):
    """A program's steps of one item.

    Attributes:
        query_row: Query row.
        sequence: The sequence whose keys it attends to.
        first_key: Its first key.
        key_end: The key after its last.
        first_step: The program's first step, counted from key 0.
        num_steps: The program's number of steps.
        has_all_steps: Whether the program has all steps of the item.
        partial_result_slot: The slot of the partial result otherwise.
    """

    query_row: Any
    sequence: Any
    first_key: Any
    key_end: Any
    first_step: Any
    num_steps: Any
    has_all_steps: Any
    partial_result_slot: Any


def program_and_head_tile(call: ScheduledCall) -> tuple[Any, Any]:
    """Returns program and tile of heads of a block; the tiles of a program are consecutive blocks, and read the same
    keys.
    """
    block = lax.axis_index("block")
    return lax.div(block, I32(call.spec.tiles_per_item)), lax.rem(block, I32(call.spec.tiles_per_item))


def for_each_item(
    call: ScheduledCall,
    process_item: Callable[[WorkItem, Any], Any],
    carry: Any,
    program_and_tile: tuple[Any, Any] | None = None,
    keys_per_step: int = KEYS_PER_STEP,
) -> Any:
    """Loops over the items of this block's program, carrying a value through `process_item`; `program_and_tile` is the
    program and tile, `keys_per_step` what the schedule counts as a step.
    """
    items, shares = call.operands["items"], call.operands["shares"]
    program, tile = program_and_head_tile(call) if program_and_tile is None else program_and_tile
    # Every warpgroup reads the list itself, from HBM, so that no barrier is needed to pass on items.
    begin, end = shares[program, 1], shares[program + 1, 1]

    def process_next_item(state: Any) -> Any:
        row, at, carry = state
        sequence, keys, start, steps, low = (items[row, n] for n in range(5))
        stop = jnp.minimum(end, start + steps)
        whole = (at == start) & (stop == start + steps)
        # An item that starts in this program's share is its last: its partial result goes to the second slot.
        slot = (program * 2 + (at == start).astype(I32)) * call.spec.tiles_per_item + tile
        # Steps of an item are counted from `start`; `low` may be several steps after key 0.
        first = lax.div(low, I32(keys_per_step)) + at - start
        carry = process_item(WorkItem(row, sequence, low, keys, first, stop - at, whole, slot), carry)
        return row + 1, stop, carry

    return lax.while_loop(lambda state: state[1] < end, process_next_item, (shares[program, 0], begin, carry))[2]
