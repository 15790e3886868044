"""States of requests are read from their slots and stored there, against a loop over requests."""

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.planning.slots import read_slots, write_slots

SLOTS = np.arange(1, 11, dtype=np.float32).reshape(5, 2)
INDICES = np.asarray([1, -1, 5, 0, 2, 3], np.int32)
STARTS = np.asarray([0, 3, 5, 6, 6, 9, 10], np.int32)  # request 3 has no tokens
USED = [i for i, slot in enumerate(INDICES) if 0 <= slot < 5 and STARTS[i + 1] > STARTS[i]]


def test_read_slots_gives_zeros_to_requests_without_slot_or_tokens():
    expected = np.zeros((6, 2), np.float32)
    for request in USED:
        expected[request] = SLOTS[INDICES[request]]
    np.testing.assert_array_equal(jax.jit(read_slots)(SLOTS, INDICES, STARTS), expected)


def test_only_state_slots_of_requests_with_tokens_are_written():
    states = -np.arange(12, dtype=np.float32).reshape(6, 2)
    expected = SLOTS.copy()
    for request in USED:
        expected[INDICES[request]] = states[request]
    written = jax.jit(write_slots)(jnp.asarray(SLOTS, jnp.bfloat16), INDICES, STARTS, states)
    np.testing.assert_array_equal(np.asarray(written, np.float32), expected)
    assert written.dtype == jnp.bfloat16
