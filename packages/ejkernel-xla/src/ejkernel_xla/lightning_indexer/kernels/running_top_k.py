"""The keys with the largest scores so far, merged with one tile of keys after another.

    state    keys selected so far, the largest score first        [t, K]
    tile     scores of the next keys, the lowest index first      [t, k]

`lax.top_k` of both together takes the first of equal entries. Tiles come in ascending order of their keys, so of equal
scores that is the key with the lower index.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.families.lightning_indexer import TopKeyIndicesAndScores, floats_from_ordered_integers


class RunningTopK(NamedTuple):
    """The selected keys of some queries.

    Attributes:
        ordered_integer_scores: [t, K], scores as integers in the order of numbers; the least integer where there is no
            key.
        indices: [t, K] int32.
    """

    ordered_integer_scores: jax.Array
    indices: jax.Array


def empty(queries: int, top_k: int, dtype: Any) -> RunningTopK:
    """Returns a selection without keys, for scores of a dtype."""
    integers = jnp.dtype(f"int{jnp.finfo(dtype).bits}")
    nothing = jnp.full((queries, top_k), jnp.iinfo(integers).min, integers)
    return RunningTopK(nothing, jnp.full((queries, top_k), -1, jnp.int32))


def merge(state: RunningTopK, in_order: jax.Array, start: jax.Array) -> RunningTopK:
    """Returns the selection from the keys so far and a tile.

    Args:
        state: The selection so far.
        in_order: [t, k], scores of the keys from `start` on, as integers in the order of numbers; the least integer
            where a key is not selectable.
        start: The first key.
    """
    index = start + lax.broadcasted_iota(jnp.int32, in_order.shape, 1)
    largest, at = lax.top_k(jnp.concatenate([state.ordered_integer_scores, in_order], axis=1), state.indices.shape[1])
    indices = jnp.take_along_axis(jnp.concatenate([state.indices, index], axis=1), at, axis=1)
    return RunningTopK(largest, indices)


def of_rows(in_order: jax.Array, top_k: int) -> RunningTopK:
    """Returns the selection from the scores of all keys, [t, S], as `merge` takes them."""
    num_keys = min(top_k, in_order.shape[1])
    largest, indices = lax.top_k(in_order, num_keys)
    missing = ((0, 0), (0, top_k - num_keys))
    least = jnp.iinfo(in_order.dtype).min
    return RunningTopK(jnp.pad(largest, missing, constant_values=least), jnp.pad(indices, missing))


def selection(state: RunningTopK, dtype: Any) -> TopKeyIndicesAndScores:
    """Returns indices, -1 where there is no key, and scores, -inf there."""
    selected = state.ordered_integer_scores > jnp.iinfo(state.ordered_integer_scores.dtype).min
    scores = jnp.where(selected, floats_from_ordered_integers(state.ordered_integer_scores, dtype), -jnp.inf)
    return jnp.where(selected, state.indices, -1), scores
