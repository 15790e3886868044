"""Defines what the dense indexer loss computes, in plain jnp.

For a query t and its keys s, from `key_starts[t]` to `key_ends[t] - 1`:

    p_ts = mean over h of exp(scale <q_th, k_s>) / sum_r exp(scale <q_th, k_r>)     attention's weights
    I_ts = sum over j of w_tj max(0, index_scale <qi_tj, ki_s>)                     the indexer's scores
    r_ts = exp(I_ts) / sum_r exp(I_tr)
    loss_t = sum_s p_ts (log p_ts - log r_ts)                                       0 for a query without keys

in float32 (float64 for float64 arrays). Attention is the target: gradients are those of the indexer's arrays, by
`dI_ts = dloss_t (r_ts - p_ts)` and the formulas of `ejkernel.families.lightning_indexer`.

Source: the dense warm-up stage of the lightning indexer, DeepSeek-V3.2-Exp (DeepSeek-AI, 2025).
"""

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.families.dense_indexer_loss.record import DenseIndexerLoss, DenseIndexerLossResiduals, accumulator
from ejkernel.families.lightning_indexer import rectify


def reference(record: DenseIndexerLoss) -> tuple[jax.Array, DenseIndexerLossResiduals]:
    """Computes the result of the family in plain jnp, with all scores in memory at once.

    Returns:
        [B, T] in the accumulator's dtype, and the residuals.
    """
    dtype, highest = accumulator(record), lax.Precision.HIGHEST
    (rows, tokens, heads, size), (_, keys, kv_heads, _) = record.query.shape, record.key.shape
    index = jnp.arange(keys, dtype=jnp.int32)
    attends = (index >= record.key_starts[..., None]) & (index < record.key_ends[..., None])
    query = record.query.astype(dtype).reshape(rows, tokens, kv_heads, heads // kv_heads, size)
    scores = jnp.einsum("btgjd,bsgd->btgjs", query, record.key.astype(dtype), precision=highest)
    scores = scores.reshape(rows, tokens, heads, keys) * record.softmax_scale
    attention_lse, log_weights = _log_softmax(scores, attends[:, :, None])
    target = jnp.mean(jnp.exp(log_weights), axis=2)
    products = jnp.einsum(
        "btje,bse->btjs", record.query_index.astype(dtype), record.key_index.astype(dtype), precision=highest
    )
    rectified = rectify(products * record.index_softmax_scale)
    index_scores = jnp.sum(record.index_weights.astype(dtype)[..., None] * rectified, axis=2)
    index_lse, log_share = _log_softmax(index_scores, attends)
    has_weight = attends & (target != 0)  # also where it is NaN
    terms = target * (jnp.log(jnp.where(has_weight, target, 1)) - jnp.where(has_weight, log_share, 0))
    losses = jnp.sum(jnp.where(has_weight, terms, 0), axis=-1)
    return losses, DenseIndexerLossResiduals(attention_lse=attention_lse, index_lse=index_lse)


def _log_softmax(scores: jax.Array, attends: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns lse over the last axis and the logarithm of each weight, both -inf where nothing is attended."""
    scores = jnp.where(attends, scores, -jnp.inf)
    row_max = jnp.max(scores, axis=-1, keepdims=True, initial=-jnp.inf)
    shift = lax.stop_gradient(jnp.where(row_max == -jnp.inf, 0, row_max))
    total = jnp.sum(jnp.where(attends, jnp.exp(jnp.where(attends, scores - shift, 0)), 0), axis=-1)
    lse = jnp.where(total != 0, jnp.log(jnp.where(total != 0, total, 1)) + shift[..., 0], -jnp.inf)
    finite = jnp.where(lse == -jnp.inf, 0, lse)[..., None]
    return lse, jnp.where(attends, jnp.where(attends, scores, 0) - finite, -jnp.inf)
