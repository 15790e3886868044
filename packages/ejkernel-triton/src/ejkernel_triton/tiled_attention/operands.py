"""A record as the kernels take it: padding masks become segment ids, and what is absent is None."""

import dataclasses

import jax
import jax.numpy as jnp

from ejkernel.families import dropout
from ejkernel.families.tiled_attention import TiledAttention


def canonical(record: TiledAttention) -> TiledAttention:
    """The record with masks of padding alone as segment ids, which let tiles be skipped, and no one-sided ids."""
    ids = (record.q_segment_ids, record.kv_segment_ids)
    if ids[0] is None or ids[1] is None:  # ids of one side restrict nothing
        record = dataclasses.replace(record, q_segment_ids=None, kv_segment_ids=None)
    mask = record.mask
    if mask is None or mask.shape[1] > 1 or min(mask.shape[2:]) > 1:
        return record
    batch, queries, keys = record.query.shape[0], record.query.shape[1], record.key.shape[1]
    q_ids = jnp.zeros((batch, queries), jnp.int32) if record.q_segment_ids is None else record.q_segment_ids
    k_ids = jnp.zeros((batch, keys), jnp.int32) if record.kv_segment_ids is None else record.kv_segment_ids
    # One of the two axes has size 1 and broadcasts over a whole row, which is then all padding or none.
    return dataclasses.replace(
        record,
        mask=None,
        q_segment_ids=jnp.where(mask[:, 0, :, 0], q_ids, -1) if mask.shape[3] == 1 else q_ids,
        kv_segment_ids=jnp.where(mask[:, 0, 0, :], k_ids, -1) if mask.shape[3] > 1 else k_ids,
    )


def operands(record: TiledAttention) -> tuple[jax.Array | None, ...]:
    """The optional arrays in the order in which every kernel takes them.

    Segment ids of queries and keys, positions of queries and keys, bias, mask, sinks [1, H], and dropout's numbers of
    the rows [B, H, T] and of the columns [1, S].
    """
    return (
        record.q_segment_ids,
        record.kv_segment_ids,
        record.q_positions,
        record.kv_positions,
        record.bias,
        record.mask,
        None if record.softmax_aux is None else record.softmax_aux[None],
        *_dropped(record),
    )


def _dropped(record: TiledAttention) -> tuple[jax.Array | None, jax.Array | None]:
    """Dropout's numbers of rows and of columns, which cost more than what the kernels make of them."""
    if record.dropout_prob == 0.0 or record.dropout_seed is None:
        return None, None
    (b, t, h, _), s = record.query.shape, record.key.shape[1]
    origin = jnp.zeros(4, jnp.int32) if record.dropout_origin is None else record.dropout_origin
    batch, head, query, key = (jnp.arange(n, dtype=jnp.int32) + origin[i] for i, n in enumerate((b, h, t, s)))
    rows = dropout.row_keys(record.dropout_seed, batch[:, None, None], head[:, None], query)
    return rows, dropout.column_keys(key)[None]
