"""Splits a batch whose sequences share a prefix, so that the keys of the prefix are read once for all of them.

Two calls of a kernel, whose results are merged by log-sum-exp, attend to two sets of keys:

    prefix   0 ........... S        all query rows of the batch as those of one sequence: tiles of many rows
    suffix                 S ... n  each sequence's rows against the keys after the prefix: tiles of few rows

Source: Ye et al. 2025, arXiv:2501.01005 (FlashInfer: composable formats for shared prefixes).
"""

import dataclasses

import jax
import jax.numpy as jnp

from ejkernel.families.paged_attention import pages as paged_cache
from ejkernel.families.paged_attention.record import PagedAttention, causal_window_bounds


@dataclasses.dataclass(frozen=True)
class SharedPrefix:
    """The keys of a shared prefix, as those of one sequence to which all query rows of the batch belong.

    Attributes:
        record: The record.
        row_positions_and_contexts: [T, 2] int32, position and context of each query row in its own sequence; None if
            no term reads them.
    """

    record: PagedAttention
    row_positions_and_contexts: jax.Array | None


def split_prefix(record: PagedAttention, *, masks_empty_sequences: bool = True) -> tuple[SharedPrefix, PagedAttention]:
    """Returns the prefix of a record and the record of the keys after it, which also has the new tokens.

    Args:
        record: The record, with a shared prefix and without first keys of sequences.
        masks_empty_sequences: Whether the kernel masks the query rows of sequences without tokens, by their positions;
            otherwise the merge has to leave them out.
    """
    assert record.shared_prefix is not None
    assert record.kv_starts is None
    sequences = record.kv_lens.shape[0]
    reads_positions = (record.sliding_window, record.chunk_size, record.alibi_slopes) != (None, None, None)
    # A query row per sequence: a sequence without tokens has one too, which must not attend to the prefix.
    reads_positions |= masks_empty_sequences and record.query_start is None
    by_row = positions_and_contexts_of_rows(record) if reads_positions else None
    suffix = dataclasses.replace(
        record, kv_starts=jnp.broadcast_to(record.shared_prefix, sequences), shared_prefix=None
    )
    prefix = dataclasses.replace(
        record,
        block_tables=None if record.block_tables is None else record.block_tables[:1],
        kv_lens=record.shared_prefix[None],
        kv_starts=None if by_row is None else _first_visible_key(record, by_row),
        query_start=_query_range_of_batch(record),
        num_seqs=None,
        new_keys=None,
        new_values=None,
        softmax_aux=None,  # a sink joins the denominator once
        qq_bias=None,  # pairs of queries are after the prefix
        causal=by_row is not None,
        shared_prefix=None,
    )
    return SharedPrefix(prefix, by_row), suffix


def positions_and_contexts_of_rows(record: PagedAttention) -> jax.Array:
    """Returns the position and the context length of each query row, [T, 2] int32. The position is -1 for padding."""
    kv_lens = record.kv_lens.astype(jnp.int32)
    if record.query_start is None:
        return jnp.stack((kv_lens - 1, kv_lens - 1), axis=1)
    sequence, position = paged_cache.token_sequences_and_positions(record)
    context = (kv_lens - paged_cache.query_ranges(record)[1])[jnp.maximum(sequence, 0)]
    return jnp.stack((jnp.where(sequence < 0, -1, position), context), axis=1)


def _query_range_of_batch(record: PagedAttention) -> jax.Array:
    """Returns the first query row of the whole batch and one more than the last, [2]."""
    if record.query_start is None:
        return jnp.array([0, record.query.shape[0]], jnp.int32)
    num_live_sequences = record.kv_lens.shape[0] if record.num_seqs is None else paged_cache.num_live_sequences(record)
    return jnp.stack((record.query_start[0], record.query_start[num_live_sequences]))


def _first_visible_key(record: PagedAttention, positions: jax.Array) -> jax.Array | None:
    """Returns the first key of the prefix that window and chunks leave to any query row, [1]; None for 0."""
    (left, _), size = causal_window_bounds(record), record.chunk_size
    if left is None and size is None:
        return None
    position = positions[:, 0]
    # Rows without a token attend to nothing.
    first = jnp.min(jnp.where(position < 0, jnp.iinfo(jnp.int32).max, position))
    starts = [0 if left is None else first - left, 0 if size is None else first // size * size]
    return jnp.clip(jnp.maximum(*starts), 0, record.shared_prefix)[None]
