"""Which blocks a query selects, against a loop over queries and blocks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.families.selected_attention.block_selection import BlockPositions, select_blocks

SIZE, BLOCKS, TOKENS = 4, 5, 20
SCORES = np.asarray([0.0, -300.0, 0.5, 0.5, 2.0], np.float32)  # the second has weight 0, the next two have equal ones


def selected(position, count):
    """The query's own block, then complete blocks before it by weight, of equal ones the later; -1 fills up."""
    own = position // SIZE
    complete = [block for block in range(own) if block * SIZE + SIZE - 1 <= position]
    ranked = sorted(complete, key=lambda block: (-np.exp(SCORES[block]), -block))
    return [own, *ranked, *[-1] * count][:count]


@pytest.mark.parametrize("count", [1, 2, 4, 7])
def test_blocks_are_selected_by_weight_and_weightless_ones_last(count):
    query, keys = jnp.ones((1, TOKENS, 1, 1)), jnp.asarray(SCORES).reshape(1, BLOCKS, 1, 1)
    positions = jnp.arange(TOKENS, dtype=jnp.int32)[None]
    places = BlockPositions(
        query_positions=positions,
        starts=jnp.arange(BLOCKS) * SIZE,
        size=SIZE,
        query_segment_ids=None,
        block_segment_ids=None,
    )
    found = jax.jit(lambda query, keys: select_blocks(query, keys, 1.0, count, places))(query, keys)
    assert found[0, :, 0].tolist() == [selected(position, count) for position in range(TOKENS)]


def test_block_weights_are_a_softmax_per_head_over_complete_blocks():
    """At the last position of a block it is complete, and takes what it weighs from the others of its head alone."""
    scores = np.asarray([[1.0, 0.0, 10.0], [0.0, 0.5, 0.0]], np.float32)  # by head and block
    query = jnp.broadcast_to(jnp.eye(2), (1, 12, 2, 2))
    keys = jnp.asarray(scores.T).reshape(1, 3, 1, 2)
    places = BlockPositions(jnp.arange(3) * SIZE, SIZE, jnp.arange(12, dtype=jnp.int32)[None], None, None)
    found = jax.jit(lambda query, keys: select_blocks(query, keys, 1.0, 2, places))(query, keys)
    assert found[0, 10:, 0].tolist() == [[2, 0], [2, 1]]
