"""The project's dropout: one keep decision per (seed, batch, head, query, key), the same on every backend.

A decision is a pure function of its five counters, so it does not depend on tile sizes, on the order in which
tiles are computed, or on whether the forward or the backward pass asks.

A row and a column have a well mixed, odd number each; a weight is dropped where their product modulo 2**32 is below
the threshold. So all that is costly is done once a row and once a column, and a weight takes one multiplication: for
two columns, or two rows, the products are spread all but evenly over all pairs of values as the other number varies.

The mixer is the finaliser of MurmurHash3 (A. Appleby, public domain):
`x ^= x >> 16; x *= 0x85EBCA6B; x ^= x >> 13; x *= 0xC2B2AE35; x ^= x >> 16`, all modulo 2**32. The product is
multiplicative hashing (D. E. Knuth, The Art of Computer Programming 3, section 6.4), of which the high bits count.
"""

import jax
import jax.numpy as jnp

GOLDEN_RATIO_MULTIPLIER = 0x9E3779B1  # 2**32 / golden ratio, made odd: spreads consecutive key indices over all bits


def mix(x: jax.Array) -> jax.Array:
    """Returns MurmurHash3's 32-bit finaliser of uint32 values of any shape."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def row_keys(seed: jax.Array, batch: jax.Array, head: jax.Array, query: jax.Array) -> jax.Array:
    """Returns one odd uint32 per softmax row: `mix(query + mix(head + mix(batch + mix(seed)))) | 1`; broadcasts its
    arguments.

    Args:
        seed: Integer scalar; its low 32 bits are used.
        batch: Global batch indices.
        head: Global query-head indices.
        query: Global query indices.
    """
    state = mix(seed.astype(jnp.uint32))
    for counter in (batch, head, query):
        state = mix(counter.astype(jnp.uint32) + state)
    return state | 1


def column_keys(key: jax.Array) -> jax.Array:
    """Returns one odd uint32 per global key index: `mix(key * GOLDEN) | 1`."""
    return mix(key.astype(jnp.uint32) * jnp.uint32(GOLDEN_RATIO_MULTIPLIER)) | 1


def dropout_threshold(dropout_prob: float) -> int:
    """Returns `dropout_prob * 2**32`: a weight is dropped if the product of its row's and column's keys is below it."""
    return min(round(dropout_prob * 2**32), 2**32 - 1)


def is_kept(row_key: jax.Array, key_index: jax.Array, dropout_prob: float) -> jax.Array:
    """Returns whether each (row, key) survives: `row_key * column_keys(key_index) >= dropout_prob * 2**32`, modulo
    2**32.

    Args:
        row_key: uint32 from `row_keys`, broadcastable against `key_index`.
        key_index: Global key indices.
        dropout_prob: Probability of dropping, in [0, 1).

    Returns:
        Boolean array of the broadcast shape, True where the weight is kept (and then scaled by `1 / (1 - p)`).
    """
    return row_key * column_keys(key_index) >= jnp.uint32(dropout_threshold(dropout_prob))
