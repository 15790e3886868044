"""The FFI call of grouped attention to listed keys (csrc/grouped_sparse_attention/attention.cu)."""

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.arithmetic import LOG2E, cdiv
from ejkernel.families.tiled_attention import SoftmaxResiduals
from ejkernel.families.token_sparse_attention import TokenSparseAttention
from ejkernel_cuda.library import register_handler

SIZE, MAX_HEADS = 128, 16
"""The size of keys and values that the kernel is compiled for, and the most query heads of a KV head."""
MAX_KEYS = 2**24
"""An entry of a group's list has 24 bits of a key and 8 of queries (csrc/grouped_sparse_attention/call.cuh)."""
QUERIES, KEYS_PER_TILE = 8, 64
"""Queries of a group, and entries of a tile."""


def forward(record: TokenSparseAttention, config: None) -> tuple[jax.Array, SoftmaxResiduals]:
    """Returns output and residuals of a record.

    Leading axes that `jax.vmap` adds to all arrays are more batch rows to the kernel. What the kernels pass on to each
    other, the lists of groups of queries, is as large as the lists of the queries.

    Args:
        record: The canonical arguments.
        config: None: there is nothing to choose.

    Returns:
        [B, T, H, 128] in the query's dtype, and lse [B, H, T] float32.
    """
    (batch, tokens, heads, _), kv_heads = record.query.shape, record.key.shape[2]
    lists, groups = record.indices.shape[2], cdiv(tokens, QUERIES)
    # Lists of a group: by both halves of the queries, by one alone, and what each query lists again.
    tiles = QUERIES * cdiv(record.indices.shape[3], KEYS_PER_TILE) + 3 + QUERIES
    call = jax.ffi.ffi_call(
        register_handler("ejkernel_grouped_sparse"),
        (
            jax.ShapeDtypeStruct(record.query.shape, record.query.dtype),
            jax.ShapeDtypeStruct((batch, heads, tokens), jnp.float32),
            jax.ShapeDtypeStruct((batch, lists, groups, tiles, KEYS_PER_TILE), jnp.int32),
            jax.ShapeDtypeStruct((batch, lists, groups), jnp.int32),
            jax.ShapeDtypeStruct((batch, kv_heads, groups), jnp.int32),
            jax.ShapeDtypeStruct((batch,), jnp.int32),
        ),
        vmap_method="broadcast_all",
    )
    # The kernel multiplies by a positive factor, after it has found maxima.
    scale = record.softmax_scale
    query = record.query if scale > 0 else -record.query if scale < 0 else 0 * record.query
    sinks = jnp.zeros(0) if record.softmax_aux is None else jnp.broadcast_to(record.softmax_aux, (batch, heads))
    output, lse, *_ = call(
        query,
        record.key,
        record.value,
        record.indices,
        sinks.astype(jnp.float32),
        score_factor=np.float32(abs(scale) * LOG2E or 1.0),
    )
    return output, SoftmaxResiduals(lse=lse)
