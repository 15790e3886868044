"""The fold of shards' summaries."""

import jax.numpy as jnp
import numpy as np

from ejkernel.planning.token_shards import Transitions, carried_states


def test_an_infinite_shard_factor_is_ignored_where_no_state_enters():
    """The second shard holds one segment, which begins in it: its factor acts on nothing."""
    factor = jnp.array([[1.0], [jnp.inf], [1.0]])
    transitions = Transitions(factor, jnp.ones((3, 1), bool), jnp.array([[True], [False], [True]]))
    entering, last = carried_states(transitions, jnp.array([[1.0], [2.0], [4.0]]), jnp.array([8.0]), matrices=False)
    np.testing.assert_array_equal(entering[:, 0], [8, 0, 2])
    np.testing.assert_array_equal(last, [6])
