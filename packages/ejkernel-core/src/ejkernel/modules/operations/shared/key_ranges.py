"""The range of keys that each query may select: causality, windows, packed sequences and padding in one form."""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.planning import packing

Window = tuple[int | None, int | None]


def key_ranges(
    sizes: tuple[int, int, int],
    cum_seqlens: tuple[jax.Array, jax.Array] | None,
    *,
    causal: bool,
    sliding_window: Window | None,
    q_positions: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns the first key of every query and the key after its last one, both [B|1, T] int32.

    The last query of a sequence has the position of its last key. The range of padding is empty.

    Args:
        sizes: Batch rows, queries and keys.
        cum_seqlens: Cumulative lengths of queries and keys: [N + 1] each with one row, [B + 1] with more; None where
            every row is one sequence.
        causal: Whether the keys after a query's position are left out.
        sliding_window: Keys before and after that position.
        q_positions: [B, T] int32, positions of the queries instead, among the keys of their sequences.
    """
    _, queries, keys = sizes
    if cum_seqlens is None:
        position = jnp.arange(queries, dtype=jnp.int32)[None] + (keys - queries) if q_positions is None else q_positions
        return _key_ranges_at_positions(position, jnp.int32(0), jnp.int32(keys), causal, sliding_window)
    position, first, length, is_token = _sequence_of_each_query(sizes, cum_seqlens)
    position = position if q_positions is None else q_positions
    starts, ends = _key_ranges_at_positions(position, first, length, causal, sliding_window)
    return jnp.where(is_token, starts, 0), jnp.where(is_token, ends, 0)


def _key_ranges_at_positions(
    positions: jax.Array, first_key: jax.Array, num_keys: jax.Array, causal: bool, window: Window | None
) -> tuple[jax.Array, jax.Array]:
    """Returns ranges of keys from positions within sequences of `num_keys` keys that begin at key `first_key`."""
    left, right = (None, None) if window is None else window
    if causal:
        right = 0 if right is None else min(right, 0)
    start = jnp.zeros_like(positions) if left is None else jnp.maximum(positions - left, 0)
    end = jnp.broadcast_to(num_keys, positions.shape)
    if right is not None:
        end = jnp.minimum(end, positions + (right + 1))
    return first_key + start, first_key + jnp.maximum(end, start)


def _sequence_of_each_query(sizes: tuple[int, int, int], cum_seqlens: tuple[jax.Array, jax.Array]) -> Any:
    """Returns the position of every query among the keys of its sequence, that sequence's first key and number of keys,
    and whether the query is a token of a sequence.
    """
    batch, queries, keys = sizes
    q_lengths, k_lengths = (jnp.diff(x.astype(jnp.int32)) for x in cum_seqlens)
    if batch > 1:
        ids, index = packing.padded_ids(cum_seqlens[0], queries)
        length = jnp.minimum(k_lengths, keys)[:, None]
        return index + length - q_lengths[:, None], jnp.int32(0), length, ids >= 0
    ids, index = packing.packed_ids(cum_seqlens[0], queries)
    sequence = jnp.maximum(ids, 0)
    if not q_lengths.size:
        return index, jnp.int32(0), jnp.int32(0), ids >= 0
    first = jnp.clip(cum_seqlens[1].astype(jnp.int32)[:-1], 0, keys)
    length = jnp.minimum(k_lengths, keys - first)
    return index + (length - q_lengths)[sequence], first[sequence], length[sequence], ids >= 0
