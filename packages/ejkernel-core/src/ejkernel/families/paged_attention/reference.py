"""Defines what paged softmax attention computes, in plain jnp.

Sequence n has `kv_lens[n]` tokens, of which the newest, `q_n`, are its queries: query i sits at position
`p_i = kv_lens[n] - q_n + i`, and `c_n = kv_lens[n] - q_n` tokens were there before. For its key at position k, query
head h and KV head `h // (H // Hk)`:

    s_ik = softmax_scale * <q_i, k_k>                                float32 accumulation
    s_ik = s_ik + alibi_slopes_h * (k - c_n) + qq_bias[i, k - c_n]   the latter for keys that are queries, k >= c_n
    s_ik = cap * tanh(s_ik / cap)                                    if logits_soft_cap; -inf stays -inf, and masks
    s_ik = score_mod(s_ik, n, h, p_i, k)                             positions in the sequence, not in pages
    s_ik = -inf                                                      unless allowed(i, k) and mask_mod(n, h, p_i, k)
    p_ik = exp(s_ik) / (exp(softmax_aux_h) + sum_k exp(s_ik))        the sink joins the denominator only
    o_i  = value_scale * sum_k p_ik * v_k

`qq_bias` is the table of sequence n if each has its own. `allowed(i, k)`: the cache has the key,
`kv_starts[n] <= k < kv_lens[n]`, `k <= p_i` if causal, `p_i - left <= k <= p_i + right` for the window, and
`k // chunk_size == p_i // chunk_size` for chunks. A row with nothing to attend gives output 0 and lse -inf (the sink's
logit if there is one); a row that belongs to no sequence gives 0 and -inf.

In a latent cache, `latent = (R, start)`, a token has one row that all query heads share (DeepSeek-V2, 2024,
arXiv:2405.04434): the first R columns are its value, and they and the D - R columns from `start` on are its key.

With `code_bits`, the cache holds TurboQuant's codes, signs and norms, of which `ejkernel.planning.turboquant` makes the
keys and values: k_k is |x| codebook[code] and then |r| signs, and v_k is |x| codebook[code]. With `rotation`, the query
is first multiplied with it, which gives the columns of such keys, and the output is rotated back.

If there are new tokens, they are written into the pages first (`paged_cache.write_new_tokens`), and attended to.

Sources: Kwon et al. 2023, arXiv:2309.06180 (paged attention); Milakov & Gimelshein 2018 (online softmax); Press et al.
2022, arXiv:2108.12409 (alibi); Xiao et al. 2023, arXiv:2309.17453 (sinks); Zandieh et al. 2025, arXiv:2504.19874
(TurboQuant).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.families.paged_attention import pages as paged_cache
from ejkernel.families.paged_attention.record import (
    PagedAttention,
    causal_window_bounds,
    in_same_chunk,
    qq_bias_of_pairs,
    round_to_compute_dtype,
    sequences_and_heads_in_call,
)
from ejkernel.families.paged_attention.rotation import rotate_back, rotate_queries
from ejkernel.families.tiled_attention import apply_soft_cap


def reference(record: PagedAttention) -> tuple[tuple[jax.Array, ...], None]:
    """Computes the result of the family in plain jnp, every query row against every slot of its table.

    Returns:
        Output [T, H, Dv], lse [T, H] and the pages that were written, if any; and no residuals.
    """
    accumulate, given = jnp.promote_types(record.query.dtype, jnp.float32), record
    record, pages = paged_cache.write_new_tokens(rotate_queries(record))
    sequence, position = paged_cache.token_sequences_and_positions(record)
    keys, values, present = _gather_pages(record, sequence, accumulate)
    scores = _scores(record, keys, sequence, position, accumulate)
    allowed = (present & _allowed_by_causal_window(record, position))[:, None]
    if record.mask_mod is not None:
        allowed = allowed & record.mask_mod.of_pairs(*_indices_of_pairs(record, sequence, position))
    sink = jnp.full(record.query.shape[1], -jnp.inf) if record.softmax_aux is None else record.softmax_aux
    sink = jnp.where((sequence >= 0)[:, None], sink.astype(accumulate), -jnp.inf)[..., None]
    row_max = jnp.maximum(jnp.max(scores, axis=-1, keepdims=True, where=allowed, initial=-jnp.inf), sink)
    shift = jnp.where(row_max > -jnp.inf, row_max, 0)
    weights = jnp.where(allowed, jnp.exp(jnp.where(allowed, scores - shift, 0)), 0)
    total = jnp.sum(weights, axis=-1, keepdims=True) + jnp.exp(sink - shift)
    weights = weights / jnp.where(total > 0, total, 1)
    lse = jnp.where(total > 0, jnp.log(jnp.where(total > 0, total, 1)) + shift, -jnp.inf)[..., 0]
    output = jnp.einsum("thk,tkhv->thv", weights, values, precision=lax.Precision.HIGHEST) * record.value_scale
    return (rotate_back(given, output.astype(record.query.dtype)), lse, *pages), None


def _gather_pages(record: PagedAttention, sequence: jax.Array, dtype: Any) -> tuple[jax.Array, ...]:
    """Returns, for every query row, the keys [T, K, H, D], values and presence bool [T, K] of the K slots of its block
    table.
    """
    heads, kv_heads = record.query.shape[1], paged_cache.kv_heads(record)
    position = jnp.arange(paged_cache.max_sequence_len(record), dtype=jnp.int32)
    page, slot = paged_cache.find_pages_and_slots(record, sequence[:, None], position[None])
    row = jnp.maximum(sequence, 0)
    present = (page < paged_cache.page_count(record)) & (position < record.kv_lens[row][:, None])
    if record.kv_starts is not None:
        present &= position >= record.kv_starts[row][:, None]
    page = jnp.where(present, page, paged_cache.page_count(record))
    head = jnp.arange(heads, dtype=jnp.int32) // (heads // kv_heads)
    keys, values = paged_cache.load_keys_and_values(record, page[..., None], slot[..., None], head)
    return (
        round_to_compute_dtype(keys, record).astype(dtype),
        round_to_compute_dtype(values, record).astype(dtype),
        present,
    )


def _scores(record: PagedAttention, keys: jax.Array, sequence: jax.Array, position: jax.Array, dtype: Any) -> jax.Array:
    """Returns scores before masking, [T, H, K]."""
    query = round_to_compute_dtype(record.query, record).astype(dtype)
    scores = jnp.einsum("thd,tkhd->thk", query, keys, precision=lax.Precision.HIGHEST) * record.softmax_scale
    context = _lengths_before_queries(record)[jnp.maximum(sequence, 0)]
    column = jnp.arange(scores.shape[-1], dtype=jnp.int32) - context[:, None]
    if record.alibi_slopes is not None:
        scores = scores + record.alibi_slopes.astype(dtype)[:, None] * column[:, None].astype(dtype)
    rows_of = paged_cache.query_ranges(record)[1]
    terms = qq_bias_of_pairs(record, rows_of, jnp.maximum(sequence, 0)[:, None], (position - context)[:, None], column)
    if terms is not None:
        scores = scores + terms[:, None].astype(dtype)
    if record.logits_soft_cap is not None:
        scores = apply_soft_cap(scores, record.logits_soft_cap)
    if record.score_mod is not None:
        scores = record.score_mod.of_pairs(scores, *_indices_of_pairs(record, sequence, position)).astype(dtype)
    return scores


def _indices_of_pairs(record: PagedAttention, sequence: jax.Array, position: jax.Array) -> tuple[jax.Array, ...]:
    """Returns what functions of pairs read: sequences [T, 1, 1], heads [1, H, 1], positions of queries [T, 1, 1] and of
    keys [1, 1, K].
    """
    row, head = sequences_and_heads_in_call(record, jnp.maximum(sequence, 0))
    key = jnp.arange(paged_cache.max_sequence_len(record), dtype=jnp.int32)
    return row[:, None, None], head[:, None][None], position[:, None, None], key[None, None]


def _lengths_before_queries(record: PagedAttention) -> jax.Array:
    """Returns tokens of each sequence before its queries."""
    return record.kv_lens.astype(jnp.int32) - paged_cache.query_ranges(record)[1]


def _allowed_by_causal_window(record: PagedAttention, position: jax.Array) -> jax.Array:
    """Returns bool [T, K]."""
    left, right = causal_window_bounds(record)
    key, position = jnp.arange(paged_cache.max_sequence_len(record), dtype=jnp.int32), position[:, None]
    allowed = in_same_chunk(record, position, key)
    allowed = jnp.ones((position.shape[0], key.shape[0]), bool) if allowed is None else allowed
    if left is not None:
        allowed &= key >= position - left
    return allowed if right is None else allowed & (key <= position + right)
