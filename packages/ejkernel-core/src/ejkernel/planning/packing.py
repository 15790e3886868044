"""Packed and padded sequences: cumulative lengths as segment ids and positions, all of it jit-able."""

import jax
import jax.numpy as jnp

MAX_COMPARED_BOUNDS = 256
"""Cumulative lengths up to which every token is compared with all of them."""


def packed_ids(cum_seqlens: jax.Array, total: int) -> tuple[jax.Array, jax.Array]:
    """Returns the sequence of every token of one packed row, and its position in that sequence.

    Args:
        cum_seqlens: [N + 1] int, non-decreasing, may be traced; sequence n has tokens
            `cum_seqlens[n] : cum_seqlens[n + 1]`. Empty sequences are allowed.
        total: Tokens in the row.

    Returns:
        Two [1, total] int32 arrays: ids in 0..N-1, -1 for padding tokens; positions from 0 (0 there).
    """
    cum_seqlens = cum_seqlens.astype(jnp.int32)
    token = jnp.arange(total, dtype=jnp.int32)
    # Counts the sequences that end at or before a token, which skips empty sequences. A few sequences are compared with
    # every token at once, which is one kernel on a GPU; a search would be a loop of kernels.
    method = "compare_all" if cum_seqlens.size <= MAX_COMPARED_BOUNDS else "scan"
    ids = jnp.searchsorted(cum_seqlens[1:], token, side="right", method=method).astype(jnp.int32)
    in_sequence = (token >= cum_seqlens[0]) & (token < cum_seqlens[-1])
    start = cum_seqlens[jnp.where(in_sequence, ids, 0)]
    return jnp.where(in_sequence, ids, -1)[None], jnp.where(in_sequence, token - start, 0)[None]


def padded_ids(cum_seqlens: jax.Array, length: int) -> tuple[jax.Array, jax.Array]:
    """Returns segment ids and positions of rows that each hold one sequence, left-aligned and followed by padding.

    Args:
        cum_seqlens: [B + 1] int, may be traced; row b holds `cum_seqlens[b + 1] - cum_seqlens[b]` tokens.
        length: Tokens in a row, padding included.

    Returns:
        Two [B, length] int32 arrays: ids, 0 for a row's tokens and -1 for padding; positions from 0 (0 for padding).
    """
    lengths = jnp.diff(cum_seqlens.astype(jnp.int32))
    token = jnp.arange(length, dtype=jnp.int32)
    in_sequence = token < lengths[:, None]
    return jnp.where(in_sequence, 0, -1), jnp.where(in_sequence, token, 0)


def both_ids(one: tuple[jax.Array, jax.Array], other: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Returns segment ids for (query, key) under which two tokens attend exactly if they do under both given pairs.

    Args:
        one: Query ids [B, T] and key ids [B, S], int32.
        other: Query ids [B, T] and key ids [B, S], int32.
    """
    first, second = (jnp.concatenate(pair, axis=1) for pair in (one, other))
    ranks = jnp.where((first < 0) | (second < 0), -1, _pair_ranks(first, second))
    queries = one[0].shape[1]
    return ranks[:, :queries], ranks[:, queries:]


def _pair_ranks(first_ids: jax.Array, second_ids: jax.Array) -> jax.Array:
    """Returns dense ranks of the pairs (first, second) within each row: equal pairs, equal ranks. [B, N] -> [B, N]
    int32.
    """
    order = jnp.lexsort((second_ids, first_ids), axis=1)
    ordered = [jnp.take_along_axis(ids, order, axis=1) for ids in (first_ids, second_ids)]
    changes = jnp.logical_or(*(ids[:, 1:] != ids[:, :-1] for ids in ordered))
    ranks = jnp.cumsum(jnp.pad(changes, ((0, 0), (1, 0))), axis=1, dtype=jnp.int32)
    rows = jnp.arange(first_ids.shape[0])[:, None]
    return jnp.zeros(first_ids.shape, jnp.int32).at[rows, order].set(ranks)
