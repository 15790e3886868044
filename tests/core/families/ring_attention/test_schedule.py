"""From how many devices a device receives keys, against a loop over all pairs of queries and keys."""

import itertools

import jax
import jax.numpy as jnp
import pytest

from ejkernel.families.ring_attention import RingAttention
from ejkernel.families.ring_attention.schedule import num_neighbours_with_keys

SIDES = (None, 0, 1, 2, 3, 4, 7)


def record(queries, keys, **masks):
    query, key = (jax.ShapeDtypeStruct((1, length, 2, 4), jnp.float32) for length in (queries, keys))
    return RingAttention(query=query, key=key, value=key, softmax_scale=1.0, axis_name="sp", **masks)


def senders(size, queries, keys, left, right):
    """(devices before, devices after) whose keys some query of a device attends to."""
    seen = {
        device - k // keys
        for device in range(size)
        for q in range(device * queries, (device + 1) * queries)
        for k in range(size * keys)
        if (left is None or k >= q - left) and (right is None or k <= q + right)
    }
    return max(0, *seen), max(0, *(-distance for distance in seen))


@pytest.mark.parametrize(("queries", "keys"), [(4, 4), (3, 3), (4, 2), (2, 3)])
def test_ring_neighbours_with_keys_are_those_a_window_reaches(queries, keys):
    for size, left, right in itertools.product((2, 3, 4), SIDES, SIDES):
        if (left, right) == (None, None):
            continue
        call = record(queries, keys, sliding_window=(left, right))
        assert num_neighbours_with_keys(call, size) == senders(size, queries, keys, left, right), (size, left, right)


def test_causal_rings_receive_no_keys_from_later_devices():
    for size, left in itertools.product((2, 4), SIDES):
        call = record(4, 4, causal=True, sliding_window=(left, 3))
        assert num_neighbours_with_keys(call, size) == senders(size, 4, 4, left, 0), (size, left)


def test_every_ring_neighbour_has_keys_with_positions_or_without_masks():
    positions = jnp.arange(4, dtype=jnp.int32)[None]
    assert num_neighbours_with_keys(record(4, 4), 4) == (3, 0)
    assert num_neighbours_with_keys(record(4, 4, causal=True, q_positions=positions, kv_positions=positions), 4) == (
        3,
        0,
    )
