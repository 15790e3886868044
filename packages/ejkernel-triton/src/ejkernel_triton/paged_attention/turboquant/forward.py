"""Forward pass of attention over codes in Triton."""

import jax
import jax.numpy as jnp

from ejkernel.families.paged_attention import PagedAttention, causal_window_bounds
from ejkernel.families.paged_attention import pages as paged_cache
from ejkernel_triton.launch import ShapeDtype, launch
from ejkernel_triton.paged_attention.turboquant.config import CodeSplits
from ejkernel_triton.paged_attention.turboquant.spec import make_code_spec

LOG2E = 1.4426950408889634


def forward(record: PagedAttention, config: CodeSplits) -> tuple[tuple[jax.Array, ...], None]:
    """Returns attention output of a record whose cache has codes.

    Args:
        record: The canonical arguments.
        config: Tile size, splits, warps and stages.

    Returns:
        Output [T, H, Dv] in the query's dtype, lse [T, H] float32 and the updated pages, if any; no residuals.
    """
    from ejkernel_triton.paged_attention.turboquant.kernels.code_attention import code_attention_kernel

    record, pages = paged_cache.write_new_tokens(record)
    assert record.block_tables is not None
    spec = make_code_spec(record, config)
    partial_shape = (1, spec.T, spec.HK, spec.NUM_SPLITS, spec.G)
    books = (None if x is None else x.astype(jnp.float32) for x in (record.key_codebook, record.value_codebook))
    inputs = (
        *(record.query, record.key_pages, record.key_signs, record.value_pages),
        *(record.key_norms, record.value_norms, *books, record.block_tables.astype(jnp.int32), _key_ranges(record)),
    )
    partials = launch(
        code_attention_kernel,
        tuple(None if x is None else x[None] for x in inputs),
        (
            ShapeDtype((*partial_shape, spec.D), jnp.float32),
            ShapeDtype(partial_shape, jnp.float32),
            ShapeDtype(partial_shape, jnp.float32),
        ),
        batch=1,
        grid=spec.T * spec.HK * spec.NUM_SPLITS,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        constants={"spec": spec},
    )
    return (*_merge_splits(record, *(x[0] for x in partials)), *pages), None


def _key_ranges(record: PagedAttention) -> jax.Array:
    """Returns sequence, first key and one more than the last key of each query row, [T, 3] int32.

    Causal order and window leave a row one range of keys; a row of no sequence has an empty one.
    """
    sequence, position = paged_cache.token_sequences_and_positions(record)
    row = jnp.maximum(sequence, 0)
    low = jnp.zeros_like(position)
    high = jnp.minimum(record.kv_lens.astype(jnp.int32)[row], paged_cache.max_sequence_len(record))
    left, right = causal_window_bounds(record)
    if left is not None:
        low = jnp.maximum(low, position - left)
    if right is not None:
        high = jnp.minimum(high, position + right + 1)
    return jnp.stack((row, low, jnp.where(sequence < 0, low, jnp.maximum(high, low))), axis=1)


def _merge_splits(
    record: PagedAttention, acc: jax.Array, row_max: jax.Array, row_sum: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns output and lse of partial softmaxes: acc [T, Hk, splits, G, Dv], maxima and sums [T, Hk, splits, G]."""
    rows, kv_heads, _, group, size = acc.shape
    sequence, _ = paged_cache.token_sequences_and_positions(record)
    sink = jnp.full((rows, kv_heads, group), -jnp.inf)
    if record.softmax_aux is not None:
        logits = record.softmax_aux.astype(jnp.float32).reshape(1, kv_heads, group) * LOG2E
        sink = jnp.where((sequence >= 0)[:, None, None], logits, sink)
    largest = jnp.maximum(jnp.max(row_max, axis=2), sink)
    shift = jnp.where(largest > -jnp.inf, largest, 0)
    weights = jnp.exp2(row_max - shift[:, :, None])
    total = jnp.sum(weights * row_sum, axis=2) + jnp.exp2(sink - shift)
    attends = total > 0
    total = jnp.where(attends, total, 1)
    output = jnp.sum(weights[..., None] * acc, axis=2) * (record.value_scale / total)[..., None]
    lse = jnp.where(attends, (jnp.log2(total) + shift) / LOG2E, -jnp.inf)
    heads = kv_heads * group
    return output.reshape(rows, heads, size).astype(record.query.dtype), lse.reshape(rows, heads)
