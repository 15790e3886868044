"""Defines what the indexer's loss computes, in plain jnp.

For a query t and the entries n of its list of keys, j = indices_tn, with an index of at least 0:

    p_tn = mean over h of exp(scale <q_th, k_j>) / sum_m exp(scale <q_th, k_m>)      attention's weights
    r_tn = exp(I_tn) / sum_m exp(I_tm)                                              the indexer's, from its scores I
    loss_t = sum_n p_tn (log p_tn - log r_tn)                                       0 where no key is listed

in float32 (float64 for float64 arrays), sums over the listed keys. Attention is the target: there is a gradient of the
scores alone, `dI_tn = dloss_t (r_tn - p_tn)`.

Source: the training of the lightning indexer on selected tokens, DeepSeek-V3.2-Exp (DeepSeek-AI, 2025).
"""

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.families.indexer_loss.record import IndexerLoss, IndexerLossResiduals, accumulator, indexer_loss_per_query


def reference(record: IndexerLoss) -> tuple[jax.Array, IndexerLossResiduals]:
    """Computes the result of the family in plain jnp, with all listed keys in memory at once.

    Returns:
        [B, T] in the accumulator's dtype, and attention's weights.
    """
    dtype = accumulator(record)
    (rows, tokens, heads, size), kv_heads = record.query.shape, record.key.shape[2]
    is_listed = record.indices >= 0
    if not record.key.shape[1]:
        target = jnp.zeros(record.indices.shape, dtype)
        return indexer_loss_per_query(record, target), IndexerLossResiduals(target=target)
    batch = jnp.arange(rows)[:, None, None]
    key = record.key.astype(dtype)[batch, jnp.maximum(record.indices, 0)]
    key = jnp.where(is_listed[..., None, None], key, 0)
    query = record.query.astype(dtype).reshape(rows, tokens, kv_heads, heads // kv_heads, size)
    scores = jnp.einsum("btghd,btkgd->btghk", query, key, precision=lax.Precision.HIGHEST) * record.softmax_scale
    is_listed = is_listed[:, :, None, None]
    weights = jax.nn.softmax(jnp.where(is_listed, scores, -jnp.inf), axis=-1)
    target = jnp.sum(jnp.where(is_listed, weights, 0), axis=(2, 3)) / heads
    return indexer_loss_per_query(record, target), IndexerLossResiduals(target=target)
