"""The range of keys that each query may select: causality, windows, packed sequences and padding in one form."""

from typing import NamedTuple

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
    sequences = find_sequences_of_queries(sizes, cum_seqlens)
    position = sequences.positions if q_positions is None else q_positions
    starts, ends = _key_ranges_at_positions(position, sequences.first_keys, sequences.num_keys, causal, sliding_window)
    return jnp.where(sequences.ids >= 0, starts, 0), jnp.where(sequences.ids >= 0, ends, 0)


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


class SequencesOfQueries(NamedTuple):
    """The sequence of every query. B rows, T queries.

    Attributes:
        ids: [B, T] int32, index of the sequence; -1 for padding.
        positions: [B, T] int32, the query's position among the keys of its sequence; the last query has that of the
            last key. Below 0 for the first queries of a sequence with more queries than keys.
        first_keys: int32 that broadcasts to [B, T], the first key of the sequence.
        num_keys: int32 that broadcasts to [B, T], how many keys it has.
    """

    ids: jax.Array
    positions: jax.Array
    first_keys: jax.Array
    num_keys: jax.Array


def find_sequences_of_queries(
    sizes: tuple[int, int, int], cum_seqlens: tuple[jax.Array, jax.Array]
) -> SequencesOfQueries:
    """Returns the sequence of every query.

    Args:
        sizes: Batch rows, queries and keys.
        cum_seqlens: Cumulative lengths of queries and keys: [N + 1] each with one row, [B + 1] with more.
    """
    batch, queries, keys = sizes
    q_lengths, k_lengths = (jnp.diff(x.astype(jnp.int32)) for x in cum_seqlens)
    if batch > 1:
        ids, index = packing.padded_ids(cum_seqlens[0], queries)
        length = jnp.minimum(k_lengths, keys)[:, None]
        return SequencesOfQueries(ids, index + length - q_lengths[:, None], jnp.int32(0), length)
    ids, index = packing.packed_ids(cum_seqlens[0], queries)
    sequence = jnp.maximum(ids, 0)
    if not q_lengths.size:
        return SequencesOfQueries(ids, index, jnp.int32(0), jnp.int32(0))
    first = jnp.clip(cum_seqlens[1].astype(jnp.int32)[:-1], 0, keys)
    length = jnp.minimum(k_lengths, keys - first)
    return SequencesOfQueries(ids, index + (length - q_lengths)[sequence], first[sequence], length[sequence])
