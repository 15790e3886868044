"""Rings of transfers that depend on no product of their step, so that XLA starts them before it and waits after it.

Of P devices, device i receives what the P // 2 devices before it have from one side, nearest first, and what the
(P - 1) // 2 devices after it have from the other side. Both directions of every link work at the same time.

    step            0              1                       2
    products        own            i - 1, i + 1            i - 2, i + 2
    transfers       of step 1      of step 2               ...

Sums that are scattered go the other way: the farthest device begins the sum of device i, each device on the way adds
its product, and device i adds its own one to the sums of both sides.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax import lax

State = TypeVar("State")


def run_gather_ring(
    part: jax.Array, axis_name: str, use_part: Callable[[Any, jax.Array, State], State], state: State
) -> State:
    """Runs one step for each device's part, whose transfer is under the products of earlier steps.

    Args:
        part: The device's own part.
        axis_name: The mesh axis.
        use_part: (index of the part's device, part, state) -> state.
        state: The first state.

    Returns:
        The state after all devices' parts.
    """
    size, me = lax.axis_size(axis_name), lax.axis_index(axis_name)
    last_distances = {1: size // 2, -1: (size - 1) // 2}
    arriving = {hop: _shift(part, axis_name, hop) for hop, last in last_distances.items() if last}
    state = use_part(me, part, state)
    for distance in range(1, size // 2 + 1):
        arrived = {hop: arriving[hop] for hop, last in last_distances.items() if distance <= last}
        arriving = {hop: _shift(x, axis_name, hop) for hop, x in arrived.items() if distance < last_distances[hop]}
        for hop, x in arrived.items():
            state = use_part((me - hop * distance) % size, x, state)
    return state


def run_scatter_ring(axis_name: str, compute_part: Callable[[Any], jax.Array]) -> jax.Array:
    """Returns the device's part of a sum over all devices.

    Args:
        axis_name: The mesh axis.
        compute_part: Index of a device -> what this device adds to that device's part.
    """
    size, me = lax.axis_size(axis_name), lax.axis_index(axis_name)
    farthest = {1: size // 2, -1: (size - 1) // 2}
    sums: dict[int, jax.Array] = {}
    for distance in range(size // 2, 0, -1):
        for hop, last in farthest.items():
            if distance <= last:
                arriving = _shift(sums[hop], axis_name, hop) if hop in sums else None
                product = compute_part((me + hop * distance) % size)
                sums[hop] = product if arriving is None else arriving + product
    arriving_sums = [_shift(x, axis_name, hop) for hop, x in sums.items()]
    return sum(arriving_sums, start=compute_part(me))


def _shift(x: jax.Array, axis_name: str, hop: int) -> jax.Array:
    """Returns what the device `hop` places before this one has."""
    size = lax.axis_size(axis_name)
    return lax.ppermute(x, axis_name, [(i, (i + hop) % size) for i in range(size)])
