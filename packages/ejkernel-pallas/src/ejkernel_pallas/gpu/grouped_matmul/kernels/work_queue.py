"""The tile scheduler of a block: the next tile comes from a counter that all blocks share, or is the `blocks`-th
after it.

    producer         request | copies of a tile ............... | publish | request | copies of the next tile ...
    HBM                counter + 1
    shared memory                                                 number[tile mod 2]
    consumers        products of a tile ................................. | next_number | products of the next ...

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
from ejkernel_pallas.gpu.grouped_matmul.spec import WARPGROUPS
from ejkernel_pallas.gpu.hopper import tile_scheduler
from ejkernel_pallas.gpu.hopper.sizes import I32

SLOTS = 2
"""Indices in shared memory: consumers may not have read the last one when the producer writes the next."""


def request(call: Call, number: Any) -> Any:
    """Requests the index of the producer's next tile; only `publish` may read the result."""
    if not call.spec.dynamic:
        return number + call.blocks
    return tile_scheduler.fetch_number(call.tile_counter)


def publish(call: Call, requested: Any, done: Any) -> Any:
    """Returns the index of the producer's next tile, and passes it to the consumers through shared memory.

    Args:
        call: The kernel's arguments.
        requested: The result of `request`.
        done: Steps of all earlier tiles.
    """
    if not call.spec.dynamic:
        return requested
    shared, slot = call.shared, _slot(call, done)
    pl.when(done >= SLOTS * call.spec.steps)(lambda: plgpu.barrier_wait(shared.number_free.at[slot]))
    # The counter starts after the blocks' first tiles, whose indices are the blocks'.
    tile_scheduler.store_number(shared.number.at[slot], requested + call.blocks)
    plgpu.barrier_arrive(shared.number_full.at[slot])
    # The producer's threads read it, too: before they arrive for the next index, and so before this slot is
    # overwritten.
    plgpu.barrier_wait(shared.number_full.at[slot])
    return tile_scheduler.load_number(shared.number.at[slot])


def next_number(call: Call, number: Any, done: Any) -> Any:
    """Returns the index of a consumer's next tile; `done` as in `publish`."""
    if not call.spec.dynamic:
        return number + call.blocks
    shared, slot = call.shared, _slot(call, done)
    plgpu.barrier_wait(shared.number_full.at[slot])
    number = tile_scheduler.load_number(shared.number.at[slot])
    plgpu.barrier_arrive(shared.number_free.at[slot])
    return number


def scratch() -> dict[str, Any]:
    """Returns shared memory and mbarriers, by the names of `consumer.Shared`."""
    return {
        "number": plgpu.SMEM((SLOTS,), jnp.int32),
        "number_full": plgpu.Barrier(num_arrivals=1, num_barriers=SLOTS),
        "number_free": plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=SLOTS),
    }


def _slot(call: Call, done: Any) -> Any:
    return lax.rem(lax.div(done, I32(call.spec.steps)), I32(SLOTS))
