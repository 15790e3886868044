"""Which tokens start from a zero state, and states that lie the other way around."""

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.families.linear_recurrence import LinearRecurrence
from ejkernel.families.linear_recurrence.record import (
    real_and_segment_start_tokens,
    to_recorded_state_layout,
    with_plain_states,
)


def test_a_token_starts_a_segment_if_the_previous_unpadded_token_has_another_id():
    ids = np.asarray(
        [[4, 7, 7, -1, 7, 2], [-1, -1, 3, 3, -1, 5], [1, 0, 1, 0, 1, 0], [-1] * 6, [9, -1, -1, -1, -1, 8]], np.int32
    )
    starts = np.zeros(ids.shape, bool)
    for row, tokens in enumerate(ids):
        latest = None
        for i, segment in enumerate(tokens):
            if segment >= 0:
                starts[row, i] = latest is not None and segment != latest
                latest = segment
    real, found = jax.jit(real_and_segment_start_tokens)(ids)
    np.testing.assert_array_equal(real, ids >= 0)
    np.testing.assert_array_equal(found, starts)


def test_transposed_states_are_transposed_on_input_and_output():
    x, state = jnp.zeros((1, 4, 1, 3)), jnp.arange(6.0).reshape(1, 1, 2, 3)
    record = LinearRecurrence(
        query=x, key=x, value=x[..., :2], initial_state=state, transposed_states=True, softmax_scale=1.0
    )
    plain = with_plain_states(record)
    np.testing.assert_array_equal(plain.initial_state, state.swapaxes(2, 3))
    np.testing.assert_array_equal(to_recorded_state_layout(record, plain.initial_state), state)
