"""Plans the sums of the backward pass: chunks of queries, and the entries of their lists ordered by key.

    indices [t, lists, K]  --stable sort by key-->  entries_by_key [lists, t K]   | key 0 ... | key 1 .. | ... | none |
                                                    key_bounds [lists, S + 1]       ^0          ^1              ^S

The gradients of the entries of one chunk are in memory at a time, so memory is linear in the number of queries.
"""

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.arithmetic import cdiv
from ejkernel.families.token_sparse_attention import TokenSparseAttention
from ejkernel_triton.launch import is_interpreting

MAX_CHUNK_BYTES = 2**28
"""The most memory that the gradients of a chunk's entries take, unless one query of every batch row needs more. Each
element of an axis of `jax.vmap` has as much again.
"""


def entry_dtype(record: TokenSparseAttention) -> jnp.dtype:
    """Returns the dtype of the gradients of entries: bfloat16 has float32's range, float16 would lose small ones."""
    return jnp.dtype(jnp.bfloat16 if record.query.dtype == jnp.bfloat16 else jnp.float32)


def queries_per_chunk(record: TokenSparseAttention, row_columns: int) -> int:
    """Returns the queries whose entries' gradients, rows of `row_columns` elements, fit MAX_CHUNK_BYTES."""
    batch, tokens, _, count = record.indices.shape
    if is_interpreting():
        return cdiv(tokens, 2)
    query_bytes = batch * count * row_columns * entry_dtype(record).itemsize
    chunks = cdiv(tokens, max(1, MAX_CHUNK_BYTES // query_bytes))
    return cdiv(tokens, chunks)


def order_entries_by_key(indices: jax.Array, num_keys: int) -> tuple[jax.Array, jax.Array]:
    """Returns the entries of lists [B, T, L, K] ordered by key, [B, L, T K], and where each key's begin, [B, L, S + 1].

    Entries of one key are in the order of the queries; empty entries come last.
    """
    batch, tokens, lists, count = indices.shape
    keys = jnp.where(indices >= 0, indices, num_keys).swapaxes(1, 2).reshape(batch, lists, tokens * count)
    entries = lax.broadcasted_iota(jnp.int32, keys.shape, 2)
    sorted_keys, entries_by_key = lax.sort((keys, entries), num_keys=1, is_stable=True)
    every_key = jnp.arange(num_keys + 1, dtype=keys.dtype)
    find = jax.vmap(jax.vmap(lambda x: jnp.searchsorted(x, every_key, method="scan_unrolled")))
    return entries_by_key, find(sorted_keys).astype(jnp.int32)
