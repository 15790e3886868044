"""The FFI call of split-KV decode attention (csrc/dense_decode/split_decode.cu)."""

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.families.paged_attention import PagedAttention, causal_window_bounds
from ejkernel_cuda.dense_decode.config import MAX_SPLITS, DecodeSplits
from ejkernel_cuda.library import register_handler

# Stands for an unbounded window; sums with a position stay within int32.
UNBOUNDED_WINDOW = 2**30


def forward(record: PagedAttention, config: DecodeSplits) -> tuple[tuple[jax.Array, jax.Array], None]:
    """Returns output [B, H, Dv] and lse [B, H] of a record with a dense cache.

    Partial sums of the blocks are two more outputs of the call, so that XLA allocates all of its memory. Leading axes
    that `jax.vmap` adds to all arrays are more rows to the kernels.
    """
    assert record.value_pages is not None  # always set for a dense cache
    (rows, heads, _), size = record.query.shape, record.value_pages.shape[-1]
    splits = min(config.num_splits, MAX_SPLITS)
    # With one split the first kernel writes the output, and no combine kernel runs.
    num_partial_results = splits if splits > 1 else 0
    left, right = causal_window_bounds(record)
    call = jax.ffi.ffi_call(
        register_handler("ejkernel_split_decode"),
        (
            jax.ShapeDtypeStruct((rows, heads, size), record.query.dtype),
            jax.ShapeDtypeStruct((rows, heads), jnp.float32),
            jax.ShapeDtypeStruct((num_partial_results, rows, heads, size), jnp.float32),
            jax.ShapeDtypeStruct((num_partial_results, rows, heads, 2), jnp.float32),
        ),
        vmap_method="broadcast_all",
    )
    zero_starts = jnp.zeros_like(record.kv_lens, jnp.int32)
    output, lse, _, _ = call(
        record.query,
        record.key_pages,
        record.value_pages,
        zero_starts if record.kv_starts is None else record.kv_starts.astype(jnp.int32),
        record.kv_lens.astype(jnp.int32),
        jnp.zeros(0, jnp.float32) if record.softmax_aux is None else record.softmax_aux.astype(jnp.float32),
        splits=np.int32(splits),
        left=np.int32(-1 if left is None else min(left, UNBOUNDED_WINDOW)),
        right=np.int32(0 if right is None else max(right, -UNBOUNDED_WINDOW)),
        scale=np.float32(record.softmax_scale),
        cap=np.float32(record.logits_soft_cap or 0.0),
    )
    return (output, lse), None
