"""Packed sequences of a single token, computed all at once: in decoding, a chunk for each would be mostly padding."""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.families.linear_recurrence import TOKEN_FIELDS, LinearRecurrence, accumulator, num_state_heads
from ejkernel_xla.linear_recurrence.kernels.chunk import ChunkTokens, advance, precision


def read_single_tokens(record: LinearRecurrence, table: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the outputs of those sequences' tokens, 0 for all others, and all states with theirs updated.

    Args:
        record: A packed record.
        table: [N * H, K, V] states of its sequences.

    Returns:
        [1, T, H, V] in the query's dtype, and the table.
    """
    bounds, tokens = jnp.asarray(record.cu_seqlens, jnp.int32), record.query.shape[1]
    alone = jnp.diff(bounds) == 1
    # Others read token 0, and `pick` replaces it by 0.
    index = jnp.where(alone, bounds[:-1], 0)

    def pick(x: jax.Array | None) -> jax.Array | None:
        if x is None:
            return None
        token = x[0, index if x.shape[1] == tokens else 0 * index].astype(accumulator(record))
        token = jnp.where(alone.reshape(-1, *(1,) * (token.ndim - 1)), token, 0)
        return token.reshape(-1, 1, *token.shape[2:])

    picked_fields: dict[str, Any] = {name: pick(getattr(record, name)) for name in TOKEN_FIELDS}
    chunk = ChunkTokens(**picked_fields)
    read, after = advance(table, chunk, record.softmax_scale, precision(record))
    read = read.reshape(-1, num_state_heads(record), read.shape[2])
    output = jnp.zeros((tokens, *read.shape[1:]), record.query.dtype)
    # Tokens that are not alone are written after the end, which drops them.
    output = output.at[jnp.where(alone, index, tokens)].set(read.astype(output.dtype), mode="drop")
    return output[None], jnp.where(jnp.repeat(alone, read.shape[1])[:, None, None], after, table)
