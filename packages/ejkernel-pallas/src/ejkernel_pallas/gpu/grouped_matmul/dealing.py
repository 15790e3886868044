"""Which tile a block makes after another: the next of a counter of all blocks, or every `blocks`-th.

    producer       take | copies of a tile ....................... | tell | learn | take | copies of the next tile ...
    device memory    counter + 1                                      |
    shared memory                                                    number[turn mod 2]
    consumers      products of a tile ............................................. | learn | products of the next ...

Tiles take unequally long: groups end in tiles of few rows, and the last columns may be half a tile. With a counter, all
blocks end at about the same time. The answer to the addition has the time of a tile's copies to arrive. Who makes a
tile does not change its bits.
"""

from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ejkernel_pallas.gpu.grouped_matmul.call import Call
from ejkernel_pallas.gpu.grouped_matmul.spec import WARPGROUPS
from ejkernel_pallas.gpu.hopper import tile_scheduler

I32 = jnp.int32
TURNS = 2
"""Numbers in shared memory: consumers may still read the last one."""


def take(call: Call, number: Any) -> Any:
    """Asks for the number of the producer's tile after this one; with dealing, `tell` alone may use the answer."""
    if not call.spec.tile.dealt:
        return number + call.blocks
    return tile_scheduler.take_number(call.counter)


def tell(call: Call, number: Any, done: Any) -> Any:
    """The number of the producer's next tile, which consumers learn, too.

    Args:
        call: What the kernel is given.
        number: Of `take`.
        done: Steps of all tiles before this one.
    """
    if not call.spec.tile.dealt:
        return number
    shared, turn = call.shared, _turn(call, done)
    pl.when(done >= TURNS * call.spec.steps)(lambda: plgpu.barrier_wait(shared.number_free.at[turn]))
    # The counter starts behind the first tiles, which have the blocks' own numbers.
    tile_scheduler.tell_number(shared.number.at[turn], number + call.blocks)
    plgpu.barrier_arrive(shared.number_full.at[turn])
    # All of the producer's threads arrive, so that none is still to read what is overwritten two turns later.
    plgpu.barrier_wait(shared.number_full.at[turn])
    return tile_scheduler.learn_number(shared.number.at[turn])


def next_number(call: Call, number: Any, done: Any) -> Any:
    """The number of a consumer's tile after this one; `done` as in `tell`."""
    if not call.spec.tile.dealt:
        return number + call.blocks
    shared, turn = call.shared, _turn(call, done)
    plgpu.barrier_wait(shared.number_full.at[turn])
    number = tile_scheduler.learn_number(shared.number.at[turn])
    plgpu.barrier_arrive(shared.number_free.at[turn])
    return number


def scratch() -> dict[str, Any]:
    """Shared memory and barriers, by the names of `rows.Shared`."""
    return {
        "number": plgpu.SMEM((TURNS,), jnp.int32),
        "number_full": plgpu.Barrier(num_arrivals=1, num_barriers=TURNS),
        "number_free": plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=TURNS),
    }


def _turn(call: Call, done: Any) -> Any:
    return lax.rem(lax.div(done, I32(call.spec.steps)), I32(TURNS))
