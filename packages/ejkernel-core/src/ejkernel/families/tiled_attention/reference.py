"""Defines what tiled softmax attention computes, in plain jnp.

For a query row i and key j of one batch row and query head h (KV head `h // (H // Hk)`):

    s_ij = softmax_scale * <q_i, k_j>                          float32 accumulation at `precision`
    s_ij = s_ij + relative_bias_h[R + clip(j - i, -R, R)]     i and j the indices in the whole call
    s_ij = s_ij + bias_ij - alibi_slopes_h |k_j - q_i|        q_i and k_j the positions (or the indices without)
    s_ij = cap * tanh(s_ij / cap)                              if logits_soft_cap; -inf stays -inf, and masks
    s_ij = score_mod(s_ij, b, h, i, j)                         of each pair; b, h, i and j the indices in the whole call
    s_ij = round s_ij to logits_dtype                          derivative 1
    s_ij = -inf                                                unless allowed(i, j)
    p_ij = exp(s_ij) / (exp(softmax_aux_h) + sum_j exp(s_ij))  the sink joins the denominator only
    o_i  = sum_j dropout_ij * p_ij * v_j                       dropout_ij = keep / (1 - dropout_prob)

`allowed(i, j)` is the conjunction of everything present: `mask`, `mask_mod(b, h, i, j)`, `pattern`, equal segment
ids >= 0, `k <= q` if causal and `q - left <= k <= q + right` for the window, where q and k are the positions (or the
indices without positions).
A row with nothing to attend gives output 0, gradient 0 and lse -inf (the sink's logit if there is one).

Sources: Vaswani et al. 2017 (attention); Milakov & Gimelshein 2018 and Dao et al. 2022 (online softmax, backward by
recomputation); Xiao et al. 2023 (attention sinks); Press et al. 2022, arXiv:2108.12409 (ALiBi); Dong et al. 2024,
arXiv:2412.05496 (functions of scores and pairs).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.families.tiled_attention.record import (
    SoftmaxResiduals,
    TiledAttention,
    causal_window_bounds,
    indices_in_call,
    query_and_key_positions,
)
from ejkernel.families.tiled_attention.scores import apply_soft_cap, round_to_logits_dtype
from ejkernel.planning import dropout
from ejkernel.types.pair_functions import PairFunction
from ejkernel.types.sparse_masks import Mask


def reference(record: TiledAttention) -> tuple[jax.Array, SoftmaxResiduals]:
    """Computes the result of the family in plain jnp, with the whole N x N matrix; in float64 if `query` is float64,
    else in float32.
    """
    accumulate = jnp.promote_types(record.query.dtype, jnp.float32)
    scores, allowed = reference_scores(record, accumulate)
    row_max = jnp.max(jnp.where(allowed, scores, -jnp.inf), axis=-1, keepdims=True)
    sink = None if record.softmax_aux is None else record.softmax_aux.astype(accumulate)[None, :, None, None]
    shift = row_max if sink is None else jnp.maximum(row_max, sink)
    shift = lax.stop_gradient(jnp.where(jnp.isfinite(shift), shift, 0))
    weights = jnp.where(allowed, jnp.exp(jnp.where(allowed, scores - shift, 0)), 0)
    total = jnp.sum(weights, axis=-1, keepdims=True) + (0 if sink is None else jnp.exp(sink - shift))
    lse = jnp.where(total > 0, jnp.log(jnp.where(total > 0, total, 1)) + shift, -jnp.inf)
    if record.normalize_output:
        weights = weights / jnp.where(total > 0, total, 1)
        extra = {}
    else:
        # The gradient of the maximum goes to the first key that has it; `jnp.max` would share it between ties.
        argmax = jnp.argmax(jnp.where(allowed, scores, -jnp.inf), axis=-1).astype(jnp.int32)
        row_max = jnp.where(row_max > -jnp.inf, jnp.take_along_axis(scores, argmax[..., None], axis=-1), 0)
        weights = jnp.where(allowed, jnp.exp(jnp.where(allowed, scores - row_max, 0)), 0)
        extra = {"row_max": row_max[..., 0], "row_argmax": argmax}
    weights = weights * _dropout_factor(record, accumulate)
    value = _repeat_heads(record.value, record.query.shape[2]).astype(accumulate)
    output = jnp.einsum("bhts,bshv->bthv", weights, value, precision=lax.Precision.HIGHEST)
    return output.astype(record.query.dtype), SoftmaxResiduals(lse=lse[..., 0], **extra)


def reference_scores(record: TiledAttention, accumulator_dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Returns scores before masking [B, H, T, S] and which of them are allowed, bool [B|1, H|1, T, S]."""
    query = record.query.astype(accumulator_dtype)
    key = _repeat_heads(record.key, record.query.shape[2]).astype(accumulator_dtype)
    scores = jnp.einsum("bthd,bshd->bhts", query, key, precision=lax.Precision.HIGHEST) * record.softmax_scale
    if record.bias is not None:
        scores = scores + record.bias.astype(accumulator_dtype)
    if record.relative_bias is not None:
        scores = scores + _bias_from_distance_table(record, record.relative_bias.astype(accumulator_dtype))
    if record.alibi_slopes is not None:
        q, k = query_and_key_positions(record)
        distance = jnp.abs(k[:, None, None, :] - q[:, None, :, None]).astype(accumulator_dtype)
        scores = scores - record.alibi_slopes.astype(accumulator_dtype)[:, :, None, None] * distance
    if record.logits_soft_cap is not None:
        scores = apply_soft_cap(scores, record.logits_soft_cap)
    if record.score_mod is not None:
        scores = _modified_scores(record, record.score_mod, scores)
    if record.logits_dtype != jnp.float32:
        scores = round_to_logits_dtype(record.logits_dtype, scores)
    return scores, _allowed_pairs(record)


def _modified_scores(record: TiledAttention, function: PairFunction, scores: jax.Array) -> jax.Array:
    """Returns the scores after `score_mod`.

    A score of -inf that stays -inf has the gradient 0, also where the function multiplies it.
    """

    def modified(scores: jax.Array) -> jax.Array:
        return function.of_pairs(scores, *indices_in_call(record)).astype(scores.dtype)

    masked = (scores == -jnp.inf) & (lax.stop_gradient(modified(scores)) == -jnp.inf)
    return jnp.where(masked, -jnp.inf, modified(jnp.where(masked, 1, scores)))


def _bias_from_distance_table(record: TiledAttention, table: jax.Array) -> jax.Array:
    """Returns the bias [1, H, T, S] of distances in the whole call, from a table [H, 2 R + 1]."""
    origin = jnp.zeros(4, jnp.int32) if record.dropout_origin is None else record.dropout_origin
    query = jnp.arange(record.query.shape[1], dtype=jnp.int32) + origin[2]
    key = jnp.arange(record.key.shape[1], dtype=jnp.int32) + origin[3]
    farthest = table.shape[1] // 2
    return table[:, farthest + jnp.clip(key - query[:, None], -farthest, farthest)][None]


def _allowed_pairs(record: TiledAttention) -> jax.Array:
    q, k = query_and_key_positions(record)
    q, k = q[:, None, :, None], k[:, None, None, :]
    left, right = causal_window_bounds(record)
    allowed = jnp.ones((1, 1, record.query.shape[1], record.key.shape[1]), bool)
    if left is not None:
        allowed &= k >= q - left
    if right is not None:
        allowed &= k <= q + right
    if record.q_segment_ids is not None and record.kv_segment_ids is not None:
        q_ids, k_ids = record.q_segment_ids[:, None, :, None], record.kv_segment_ids[:, None, None, :]
        allowed &= (q_ids == k_ids) & (q_ids >= 0)
    if record.pattern is not None:
        allowed &= _pattern_allows(record, record.pattern)
    if record.mask_mod is not None:
        allowed &= record.mask_mod.of_pairs(*indices_in_call(record))
    return allowed if record.mask is None else allowed & record.mask


def _pattern_allows(record: TiledAttention, pattern: Mask) -> jax.Array:
    origin = jnp.zeros(4, jnp.int32) if record.dropout_origin is None else record.dropout_origin
    (_, t, h, _), s = record.query.shape, record.key.shape[1]
    if pattern.heads is None:
        return pattern.allowed(origin[2], origin[3], (t, s))
    heads = jnp.stack([pattern.of_head(n).allowed(origin[2], origin[3], (t, s)) for n in range(pattern.heads)])
    return lax.dynamic_slice_in_dim(heads, origin[1], h)


def _dropout_factor(record: TiledAttention, accumulator_dtype: Any) -> jax.Array | float:
    if record.dropout_prob == 0.0 or record.dropout_seed is None:
        return 1.0
    (b, t, h, _), s = record.query.shape, record.key.shape[1]
    origin = jnp.zeros(4, jnp.int32) if record.dropout_origin is None else record.dropout_origin
    batch, head, query, key = (jnp.arange(n, dtype=jnp.int32) + origin[i] for i, n in enumerate((b, h, t, s)))
    rows = dropout.row_keys(record.dropout_seed, batch[:, None, None], head[:, None], query)
    kept = dropout.is_kept(rows[..., None], key, record.dropout_prob)
    return kept.astype(accumulator_dtype) / (1.0 - record.dropout_prob)


def _repeat_heads(x: jax.Array, heads: int) -> jax.Array:
    return jnp.repeat(x, heads // x.shape[2], axis=2)
