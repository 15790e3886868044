"""Defines what token-sparse attention computes, in plain jnp.

For a query i, a query head h (KV head `h // (H // Hk)`) and the entries n of the query's list of keys, j = indices_in:

    s_in = softmax_scale <q_i, k_j>                            float32 accumulation
    p_in = exp(s_in) / (exp(softmax_aux_h) + sum_n exp(s_in))  the sink joins the denominator only
    o_i  = sum_n p_in v_j                                      v_j the first Dv entries of k_j where there is no value
    lse_i = log(exp(softmax_aux_h) + sum_n exp(s_in))

Sums are over the entries with an index of at least 0, each as often as it is listed. A row without any gives output 0,
gradient 0 and lse -inf (the sink's logit if there is one).

With the cotangents do of the output and dlse of lse, and delta_i = <do_i, o_i> - dlse_i:

    dv_j = sum of p_in do_i               ds_in = p_in (<do_i, v_j> - delta_i)
    dq_i = scale sum_n ds_in k_j          dk_j = scale sum of ds_in q_i          over i, n with indices_in = j
    dsoftmax_aux_h = -sum_i exp(softmax_aux_h - lse_i) delta_i

Source: the attention of DeepSeek Sparse Attention, DeepSeek-V3.2-Exp (DeepSeek-AI, 2025).
"""

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.families.tiled_attention import SoftmaxResiduals
from ejkernel.families.token_sparse_attention.record import TokenSparseAttention, accumulator, decode_keys


def reference(record: TokenSparseAttention) -> tuple[jax.Array, SoftmaxResiduals]:
    """Computes the result of the family in plain jnp, with all listed keys in memory at once; in float64 if `query` is
    float64, else in float32.

    Returns:
        [B, T, H, Dv] in the query's dtype, and lse [B, H, T].
    """
    dtype = accumulator(record)
    (rows, tokens, heads, channels), kv_heads = record.query.shape, record.key.shape[2]
    keys = decode_keys(record.key, record, dtype)
    value = keys[..., : record.value_size] if record.value is None else record.value
    indices = jnp.broadcast_to(record.indices, (rows, tokens, kv_heads, record.indices.shape[3]))
    is_listed = (indices >= 0)[:, :, :, None]
    key, value = (_gather_listed(x.astype(dtype), indices) for x in (keys, value))
    query = record.query.astype(dtype).reshape(rows, tokens, kv_heads, heads // kv_heads, channels)
    highest = lax.Precision.HIGHEST
    scores = jnp.einsum("btghd,btgkd->btghk", query, key, precision=highest) * record.softmax_scale
    scores = jnp.where(is_listed, scores, -jnp.inf)
    shift = jnp.max(scores, axis=-1, keepdims=True, initial=-jnp.inf)
    sink = None
    if record.softmax_aux is not None:
        sink = record.softmax_aux.astype(dtype).reshape(kv_heads, heads // kv_heads, 1)
        shift = jnp.maximum(shift, sink)
    shift = lax.stop_gradient(jnp.where(shift == -jnp.inf, 0, shift))
    weights = jnp.where(is_listed, jnp.exp(jnp.where(is_listed, scores - shift, 0)), 0)
    total = jnp.sum(weights, axis=-1, keepdims=True) + (0 if sink is None else jnp.exp(sink - shift))
    attends = total != 0  # also where it is NaN
    denominator = jnp.where(attends, total, 1)
    lse = jnp.where(attends, jnp.log(denominator) + shift, -jnp.inf)
    output = jnp.einsum("btghk,btgkv->btghv", weights / denominator, value, precision=highest)
    output = output.reshape(rows, tokens, heads, record.value_size).astype(record.query.dtype)
    return output, SoftmaxResiduals(lse=lse.reshape(rows, tokens, heads).swapaxes(1, 2))


def _gather_listed(x: jax.Array, indices: jax.Array) -> jax.Array:
    """Returns rows of x [B, S, Hk, n] at indices [B, T, Hk, K], 0 for an index below 0: [B, T, Hk, K, n]."""
    if not x.shape[1]:
        return jnp.zeros((*indices.shape, x.shape[3]), x.dtype)
    batch = jnp.arange(x.shape[0])[:, None, None, None]
    head = jnp.arange(x.shape[2])[:, None]
    return jnp.where((indices >= 0)[..., None], x[batch, jnp.maximum(indices, 0), head], 0)
