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

    Leading axes that `jax.vmap` adds to all arrays are more batch rows to the kernel.

    Args:
        record: The canonical arguments.
        config: How many blocks share a list.

    Returns:
        [B, T, H, 512] in the query's dtype, and lse [B, H, T] float32.
    """
    batch, tokens, heads, _ = record.query.shape
    call = jax.ffi.ffi_call(
        register_handler("ejkernel_latent_sparse"),
        (
            jax.ShapeDtypeStruct((batch, tokens, heads, VALUE_SIZE), record.query.dtype),
            jax.ShapeDtypeStruct((batch, heads, tokens), jnp.float32),
        ),
        vmap_method="broadcast_all",
    )
    # The kernel multiplies by a positive factor, after it has found maxima.
    scale = record.softmax_scale
    query = record.query if scale > 0 else -record.query if scale < 0 else 0 * record.query
    sinks = jnp.zeros(0) if record.softmax_aux is None else jnp.broadcast_to(record.softmax_aux, (batch, heads))
    output, lse = call(
        query,
        record.key,
        record.indices,
        sinks.astype(jnp.float32),
        splits=np.int32(min(config.splits, max_splits(record))),
        score_factor=np.float32(abs(scale) * LOG2E or 1.0),
    )
    return output, SoftmaxResiduals(lse=lse)
