"""A record's arrays as the kernels take them: what is absent is None."""

import jax
import jax.numpy as jnp

from ejkernel.families import dropout
from ejkernel.families.tiled_attention import TiledAttention


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
