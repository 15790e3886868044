"""Prints whether a sequence has the same bits alone and in a batch, in a `batch_invariant` block with ALiBi."""

import jax
import jax.numpy as jnp

from ejkernel.modules import unified_attention
from ejkernel.ops import batch_invariant

KEYS = jax.random.split(jax.random.key(0), 2)
QUERIES, (PAGES, VALUES) = jax.random.normal(KEYS[0], (15, 4, 6)), jax.random.normal(KEYS[1], (2, 12, 8, 2, 6))
SLOPES = jnp.array([0.7, -1.3, 0.3, 0.11])
LENGTHS, STARTS = jnp.array([20, 33, 0, 7, 5]), jnp.array([0, 7, 8, 8, 8, 13])
TABLES = jnp.array([[3, 5, 7, 0, 0], [1, 2, 9, 11, 8], [0, 0, 0, 0, 0], [4, 1, 6, 0, 0], [10, 5, 3, 3, 3]])


def outputs(sequences: int) -> jax.Array:
    """Returns the outputs of the first sequences."""
    rows = int(STARTS[sequences])
    lists = LENGTHS[:sequences], TABLES[:sequences], STARTS[: sequences + 1]
    return unified_attention(QUERIES[:rows], PAGES, VALUES, *lists, alibi_slopes=SLOPES, platform="xla")


with batch_invariant():
    print(bool((outputs(5)[:7] == outputs(1)).all()))
