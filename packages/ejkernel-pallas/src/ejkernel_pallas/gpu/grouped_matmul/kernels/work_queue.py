"""The tile scheduler of a block: the next tile comes from a counter that all blocks share, or is the `num_blocks`-th
after it.

    producer         request | copies of a tile ............... | publish | request | copies of the next tile ...
    HBM                counter + 1
    shared memory                                                 next_tile_index[tile mod 2]
    consumers        products of a tile ................................. | wait | products of the next ...

Tiles take different times: groups end in tiles of few rows, and the last columns may be half a tile. With a counter (a
dynamic tile scheduler), all blocks end at about the same time. The latency of the counter overlaps with a tile's
copies. Results do not depend on the assignment of tiles to blocks.
"""

from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ejkernel_pallas.gpu.grouped_matmul.kernels.call import Call
from ejkernel_pallas.gpu.grouped_matmul.spec import CONSUMER_WARPGROUPS
from ejkernel_pallas.gpu.hopper import tile_scheduler
from ejkernel_pallas.gpu.hopper.sizes import I32

TILE_INDEX_SLOTS = 2
"""Indices in shared memory: consumers may not have read the last one when the producer writes the next."""


def request_next_tile(call: Call, tile_index: Any) -> Any:
    """Requests the index of the producer's next tile; only `publish_next_tile` may read the result."""
    if not call.spec.dynamic_schedule:
        return tile_index + call.num_blocks
    return tile_scheduler.fetch_tile_index(call.tile_counter)


def publish_next_tile(call: Call, requested_tile_index: Any, steps_done: Any) -> Any:
    """Returns the index of the producer's next tile, and passes it to the consumers through shared memory.

    Args:
        call: The kernel's arguments.
        requested_tile_index: The result of `request_next_tile`.
        steps_done: Steps of all earlier tiles.
    """
    if not call.spec.dynamic_schedule:
        return requested_tile_index
    shared, slot = call.shared_memory, _tile_index_slot(call, steps_done)
    pl.when(steps_done >= TILE_INDEX_SLOTS * call.spec.steps_per_tile)(
        lambda: plgpu.barrier_wait(shared.next_tile_free.at[slot])
    )
    # The counter starts after the blocks' first tiles, whose indices are the blocks'.
    tile_scheduler.store_tile_index(shared.next_tile_index.at[slot], requested_tile_index + call.num_blocks)
    plgpu.barrier_arrive(shared.next_tile_full.at[slot])
    # The producer's threads read it, too: before they arrive for the next index, and so before this slot is
    # overwritten.
    plgpu.barrier_wait(shared.next_tile_full.at[slot])
    return tile_scheduler.load_tile_index(shared.next_tile_index.at[slot])


def wait_for_next_tile(call: Call, tile_index: Any, steps_done: Any) -> Any:
    """Returns the index of a consumer's next tile; `steps_done` as in `publish_next_tile`."""
    if not call.spec.dynamic_schedule:
        return tile_index + call.num_blocks
    shared, slot = call.shared_memory, _tile_index_slot(call, steps_done)
    plgpu.barrier_wait(shared.next_tile_full.at[slot])
    tile_index = tile_scheduler.load_tile_index(shared.next_tile_index.at[slot])
    plgpu.barrier_arrive(shared.next_tile_free.at[slot])
    return tile_index


def queue_scratch() -> dict[str, Any]:
    """Returns shared memory and mbarriers, by the names of `consumer.SharedMemory`."""
    return {
        "next_tile_index": plgpu.SMEM((TILE_INDEX_SLOTS,), jnp.int32),
        "next_tile_full": plgpu.Barrier(num_arrivals=1, num_barriers=TILE_INDEX_SLOTS),
        "next_tile_free": plgpu.Barrier(num_arrivals=CONSUMER_WARPGROUPS, num_barriers=TILE_INDEX_SLOTS),
    }


def _tile_index_slot(call: Call, steps_done: Any) -> Any:
    return lax.rem(lax.div(steps_done, I32(call.spec.steps_per_tile)), I32(TILE_INDEX_SLOTS))
