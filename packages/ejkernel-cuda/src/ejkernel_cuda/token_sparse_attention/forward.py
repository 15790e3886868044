"""The FFI call of latent attention to listed keys (csrc/token_sparse_attention/latent.cu)."""

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.arithmetic import LOG2E
from ejkernel.families.tiled_attention import SoftmaxResiduals
from ejkernel.families.token_sparse_attention import TokenSparseAttention
from ejkernel_cuda.library import register_handler
from ejkernel_cuda.token_sparse_attention.config import VALUE_SIZE, LatentSplits, max_splits


def forward(record: TokenSparseAttention, config: LatentSplits) -> tuple[jax.Array, SoftmaxResiduals]:
    """Returns output and residuals of a record.

    Partial results of splits are outputs of the call, which XLA merges. Leading axes that `jax.vmap` adds to all arrays
    are more batch rows to the kernel.

    Args:
        record: The canonical arguments.
        config: How many blocks share a list.

    Returns:
        [B, T, H, 512] in the query's dtype, and lse [B, H, T] float32.
    """
    batch, tokens, heads, _ = record.query.shape
    splits = min(config.splits, max_splits(record))
    is_split = splits > 1
    shape, split_shape = (batch, tokens, heads, VALUE_SIZE), (batch, tokens, splits, heads, VALUE_SIZE)
    call = jax.ffi.ffi_call(
        register_handler("ejkernel_latent_sparse"),
        (
            jax.ShapeDtypeStruct((0,) if is_split else shape, record.query.dtype),
            jax.ShapeDtypeStruct((0,) if is_split else (batch, heads, tokens), jnp.float32),
            jax.ShapeDtypeStruct(split_shape if is_split else (0,), jnp.float32),
            jax.ShapeDtypeStruct(split_shape[:-1] if is_split else (0,), jnp.float32),
        ),
        vmap_method="broadcast_all",
    )
    # The kernel multiplies by a positive factor, after it has found maxima.
    scale = record.softmax_scale
    query = record.query if scale > 0 else -record.query if scale < 0 else 0 * record.query
    sinks = None if record.softmax_aux is None else record.softmax_aux.astype(jnp.float32)
    output, lse, partial, partial_lse = call(
        query,
        record.key,
        record.indices,
        jnp.zeros(0, jnp.float32) if sinks is None or is_split else jnp.broadcast_to(sinks, (batch, heads)),
        splits=np.int32(splits),
        score_factor=np.float32(abs(scale) * LOG2E or 1.0),
    )
    if is_split:
        output, lse = _merge_splits(record, partial, partial_lse, sinks)
    return output, SoftmaxResiduals(lse=lse)


def _merge_splits(
    record: TokenSparseAttention, partial: jax.Array, partial_lse: jax.Array, sinks: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Returns output and lse from those of splits, [B, T, splits, H, 512] and [B, T, splits, H]."""
    top = jnp.max(partial_lse, axis=2)
    if sinks is not None:
        top = jnp.maximum(top, sinks)
    shift = jnp.where(top == -jnp.inf, 0, top)
    weights = jnp.exp(partial_lse - shift[:, :, None])
    total = jnp.sum(weights, axis=2) + (0 if sinks is None else jnp.exp(sinks - shift))
    attends = total != 0  # also where it is NaN
    denominator = jnp.where(attends, total, 1)
    output = jnp.sum((weights / denominator[:, :, None])[..., None] * partial, axis=2)
    lse = jnp.where(attends, jnp.log(denominator) + shift, -jnp.inf)
    return output.astype(record.query.dtype), lse.swapaxes(1, 2)
