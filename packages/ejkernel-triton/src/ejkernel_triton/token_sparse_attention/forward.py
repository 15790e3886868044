"""Forward pass of token-sparse attention in Triton."""

import jax
import jax.numpy as jnp

from ejkernel.arithmetic import cdiv
from ejkernel.families.tiled_attention import SoftmaxResiduals
from ejkernel.families.token_sparse_attention import TokenSparseAttention
from ejkernel_triton.launch import ShapeDtype, launch
from ejkernel_triton.token_sparse_attention.config import SparseForward
from ejkernel_triton.token_sparse_attention.spec import make_spec


def forward(record: TokenSparseAttention, config: SparseForward) -> tuple[jax.Array, SoftmaxResiduals]:
    """Returns output and residuals of a record.

    Args:
        record: The canonical arguments.
        config: Tiles, warps and stages.

    Returns:
        [B, T, H, Dv] in the query's dtype, and lse [B, H, T] float32.
    """
    from ejkernel_triton.token_sparse_attention.kernels.sparse_fwd import sparse_fwd_kernel

    spec, batch = make_spec(record), record.query.shape[0]
    sinks = None if record.softmax_aux is None else record.softmax_aux[None].astype(jnp.float32)
    output, lse = launch(
        sparse_fwd_kernel,
        (record.query, *key_and_value_inputs(record), record.indices, sinks),
        [
            ShapeDtype((batch, spec.T, spec.H, spec.DV), record.query.dtype),
            ShapeDtype((batch, spec.H, spec.T), jnp.float32),
        ],
        batch=batch,
        grid=cdiv(spec.G, config.heads) * spec.HK * spec.T * batch,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        constants={"spec": spec, "HEADS": config.heads, "BLOCK_KV": config.block_kv},
    )
    return output, SoftmaxResiduals(lse=lse)


def key_and_value_inputs(record: TokenSparseAttention) -> tuple[jax.Array, jax.Array]:
    """Returns keys and values; keys twice where a value is the start of its key."""
    return record.key, record.key if record.value is None else record.value
