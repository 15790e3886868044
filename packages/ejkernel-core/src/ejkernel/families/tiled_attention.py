"""The tiled softmax attention family: the record its operations lower to, its meaning and its residuals.

For a query row i and key j of one batch row and query head h (KV head `h // (H // Hk)`):

    s_ij = softmax_scale * <q_i, k_j>                          float32 accumulation at `precision`
    s_ij = s_ij + bias_ij
    s_ij = cap * tanh(s_ij / cap)                              if logits_soft_cap; -inf stays -inf, and masks
    s_ij = round s_ij to logits_dtype                          derivative 1
    s_ij = -inf                                                unless allowed(i, j)
    p_ij = exp(s_ij) / (exp(softmax_aux_h) + sum_j exp(s_ij))  the sink joins the denominator only
    o_i  = sum_j dropout_ij * p_ij * v_j                       dropout_ij = keep / (1 - dropout_prob)

`allowed(i, j)` is the conjunction of everything present: `mask`, `pattern`, equal segment ids >= 0, `k <= q` if causal
and `q - left <= k <= q + right` for the window, where q and k are the positions (or the indices without positions).
A row with nothing to attend gives output 0, gradient 0 and lse -inf (the sink's logit if there is one).

Sources: Vaswani et al. 2017 (attention); Milakov & Gimelshein 2018 and Dao et al. 2022 (online softmax, backward by
recomputation); Xiao et al. 2023 (attention sinks).
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.ops.arguments import arguments, static
from ejkernel.ops.model import Family, Isolation
from ejkernel.ops.pullback import Pullback
from ejkernel.planning import dropout
from ejkernel.planning.isolation import has_segments, isolate_pullback, isolate_record
from ejkernel.planning.precision import rounded
from ejkernel.planning.requests import same_owner, segment_owners
from ejkernel.promotion import promoting
from ejkernel.types.integers import NO_LIMIT
from ejkernel.types.sparse_masks import Mask

Window = tuple[int | None, int | None]
FAR = NO_LIMIT


@arguments
class TiledAttention:
    """Canonical input of one attention call. B batch, T queries, S keys, H query heads, Hk KV heads, D and Dv sizes.

    Attributes:
        query: [B, T, H, D] floating.
        key: [B, S, Hk, D], same dtype as query.
        value: [B, S, Hk, Dv], same dtype as query.
        softmax_scale: Factor on the raw scores.
        bias: [B|1, H|1, T|1, S|1] floating, added to the scaled scores.
        mask: [B|1, H|1, T|1, S|1] bool, True attends.
        q_segment_ids: [B, T] int32; with kv_segment_ids: equal ids >= 0 attend, < 0 is padding.
        kv_segment_ids: [B, S] int32.
        q_positions: [B|1, T] int32 that causal and window compare instead of the query index; at most
            `ejkernel.types.integers.POSITION_LIMIT` from 0, so that differences and sums with a window stay in int32.
        kv_positions: [B|1, S] int32, likewise for keys.
        softmax_aux: [H] float32, one sink logit a head.
        dropout_seed: uint32 scalar.
        dropout_origin: [4] int32, global (batch, head, query, key) index of this record's first element, for
            records that are one shard of a call; None is all zeros. It says which part of `pattern` applies, too.
        dropout_prob: Probability of dropping a weight, in [0, 1).
        causal: Key position at most query position.
        sliding_window: (left, right), inclusive; None on a side leaves it open.
        pattern: Pairs that attend by their indices in the whole call, known when it is traced.
        logits_soft_cap: Cap c of `c * tanh(s / c)`.
        normalize_output: False returns the numerator relative to the row's maximum, `sum_j exp(s_ij - max_j s_ij) v_j`.
        precision: Of the matrix products; None for what `ejkernel.planning.precision` says.
        logits_dtype: Scores are rounded to it before the softmax.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    softmax_scale: float = static()
    bias: jax.Array | None = None
    mask: jax.Array | None = None
    q_segment_ids: jax.Array | None = None
    kv_segment_ids: jax.Array | None = None
    q_positions: jax.Array | None = None
    kv_positions: jax.Array | None = None
    softmax_aux: jax.Array | None = None
    dropout_seed: jax.Array | None = None
    dropout_origin: jax.Array | None = None
    dropout_prob: float = static(0.0)
    causal: bool = static(False)
    sliding_window: Window | None = static(None)
    pattern: Mask | None = static(default=None)
    logits_soft_cap: float | None = static(None)
    normalize_output: bool = static(True)
    precision: lax.Precision | None = static(default=None)
    logits_dtype: Any = static(jnp.dtype("float32"))


@arguments
class SoftmaxResiduals:
    """What a forward pass leaves for the backward pass, beside the output.

    Attributes:
        lse: [B, H, T] float32, log of the softmax denominator, sink included; -inf for empty rows.
        row_max: [B, H, T] float32, the largest allowed score; only if not `normalize_output`.
        row_argmax: [B, H, T] int32, the key that has it; only if not `normalize_output`.
    """

    lse: jax.Array
    row_max: jax.Array | None = None
    row_argmax: jax.Array | None = None


def band(record: TiledAttention) -> Window:
    """(left, right) such that causal and window together allow `-left <= k - q <= right`; None is unbounded.

    A side of `FAR` or more is unbounded too: int32 positions plus such a side would wrap around.
    """
    left, right = (side if side is None or side < FAR else None for side in record.sliding_window or (None, None))
    if record.causal:
        right = 0 if right is None else min(right, 0)
    return left, right


def positions(record: TiledAttention) -> tuple[jax.Array, jax.Array]:
    """Query and key positions, [B|1, T] and [B|1, S] int32."""
    q, k = record.q_positions, record.kv_positions
    q = jnp.arange(record.query.shape[1], dtype=jnp.int32)[None] if q is None else q
    k = jnp.arange(record.key.shape[1], dtype=jnp.int32)[None] if k is None else k
    return q, k


def localise(record: TiledAttention, offsets: Mapping[str, jax.Array]) -> TiledAttention:
    """Makes one shard's record mean its part of the global call: positions and the counters of dropout are global."""
    queries = offsets.get("t")
    moved: dict[str, jax.Array] = {}
    if queries is not None and record.q_positions is None and band(record) != (None, None):
        moved["q_positions"] = positions(record)[0] + queries
    if record.dropout_prob > 0.0 or record.pattern is not None:
        moved["dropout_origin"] = jnp.stack([jnp.int32(offsets.get(letter, 0)) for letter in "bhts"])
    return dataclasses.replace(record, **moved)


def dropout_numbers(record: TiledAttention) -> tuple[jax.Array, jax.Array]:
    """Dropout's numbers of rows [B, H, T] and of columns [1, S], uint32, of a record with a seed.

    They cost more than what a kernel makes of them, and are made once before it.
    """
    (b, t, h, _), s = record.query.shape, record.key.shape[1]
    origin = jnp.zeros(4, jnp.int32) if record.dropout_origin is None else record.dropout_origin
    batch, head, query, key = (jnp.arange(n, dtype=jnp.int32) + origin[i] for i, n in enumerate((b, h, t, s)))
    assert record.dropout_seed is not None  # the caller looked
    rows = dropout.row_keys(record.dropout_seed, batch[:, None, None], head[:, None], query)
    return rows, dropout.column_keys(key)[None]


def less_lse_cotangent(delta: jax.Array, pullback: Pullback) -> jax.Array:
    """Delta [B, H, T] less the cotangent of lse, whose derivative by the score s_ij is p_ij; as it is without one.

    A row with nothing to attend has no gradient, whatever the cotangent of its lse holds.
    """
    cotangent, lse = pullback.lse_cotangent, pullback.residuals.lse
    return delta if cotangent is None else delta - jnp.where(lse == -jnp.inf, 0, cotangent)


def two_passes(pullback: Pullback) -> tuple[Pullback, Pullback]:
    """Two backward passes whose gradients add up: of an output that is not normalised, and of its lse.

    Their scores are shifted differently, by the maximum and by lse, so that no kernel has both.
    """
    normal = dataclasses.replace(pullback.record, normalize_output=True)
    nothing = jnp.zeros_like(pullback.cotangent)
    return (
        dataclasses.replace(pullback, lse_cotangent=None),
        dataclasses.replace(pullback, record=normal, output=nothing, cotangent=nothing),
    )


def added_up(
    backward: Callable[[Pullback, Any], dict[str, jax.Array]], pullback: Pullback, config: Any
) -> dict[str, jax.Array]:
    """The gradients of a pullback whose output is not normalised and whose lse has a cotangent."""
    first, second = (backward(part, config) for part in two_passes(pullback))
    return {name: first[name] + second[name] for name in pullback.wanted}


def sinks_gradient(pullback: Pullback, delta: jax.Array) -> jax.Array:
    """Gradient of the sinks, [H]: `-sum_i exp(sink_h - lse_i) (delta_i - dlse_i)`.

    Args:
        pullback: Of a record with sinks.
        delta: [B, H, T], the product of each row's output and its cotangent.
    """
    sinks, lse = pullback.record.softmax_aux, pullback.residuals.lse
    if not pullback.record.normalize_output:  # subtracting the maximum is part of its meaning
        return jnp.zeros_like(sinks)
    share = jnp.exp(sinks[:, None] - jnp.where(lse == -jnp.inf, 0, lse)) * less_lse_cotangent(delta, pullback)
    return -share.sum(axis=(0, 2)).astype(sinks.dtype)


def reference(record: TiledAttention) -> tuple[jax.Array, SoftmaxResiduals]:
    """The family's meaning in plain jnp, N x N and all; float64 if query is, else float32."""
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


def reference_scores(record: TiledAttention, accumulate: Any) -> tuple[jax.Array, jax.Array]:
    """Scores before masking [B, H, T, S] and which of them are allowed, bool [B|1, H|1, T, S]."""
    query = record.query.astype(accumulate)
    key = _repeat_heads(record.key, record.query.shape[2]).astype(accumulate)
    scores = jnp.einsum("bthd,bshd->bhts", query, key, precision=lax.Precision.HIGHEST) * record.softmax_scale
    if record.bias is not None:
        scores = scores + record.bias.astype(accumulate)
    if record.logits_soft_cap is not None:
        scores = soft_capped(scores, record.logits_soft_cap)
    if record.logits_dtype != jnp.float32:
        scores = coarse(record.logits_dtype, scores)
    return scores, _allowed(record)


def soft_capped(scores: jax.Array, cap: float) -> jax.Array:
    """Scores within (-cap, cap); what an additive mask of -inf masks stays masked, and has gradient 0."""
    masked = scores == -jnp.inf
    return jnp.where(masked, -jnp.inf, cap * jnp.tanh(jnp.where(masked, 0, scores) / cap))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def coarse(dtype: Any, scores: jax.Array) -> jax.Array:
    """Scores with the digits of a narrower dtype, in their own; derivative 1."""
    return rounded(scores, dtype)


@coarse.defjvp
@promoting
def _coarse_jvp(dtype: Any, primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    return coarse(dtype, *primals), tangents[0]


def _allowed(record: TiledAttention) -> jax.Array:
    q, k = positions(record)
    q, k = q[:, None, :, None], k[:, None, None, :]
    left, right = band(record)
    allowed = jnp.ones((1, 1, record.query.shape[1], record.key.shape[1]), bool)
    if left is not None:
        allowed &= k >= q - left
    if right is not None:
        allowed &= k <= q + right
    if record.q_segment_ids is not None and record.kv_segment_ids is not None:
        q_ids, k_ids = record.q_segment_ids[:, None, :, None], record.kv_segment_ids[:, None, None, :]
        allowed &= (q_ids == k_ids) & (q_ids >= 0)
    if record.pattern is not None:
        allowed &= _in_pattern(record, record.pattern)
    return allowed if record.mask is None else allowed & record.mask


def _in_pattern(record: TiledAttention, pattern: Mask) -> jax.Array:
    origin = jnp.zeros(4, jnp.int32) if record.dropout_origin is None else record.dropout_origin
    (_, t, h, _), s = record.query.shape, record.key.shape[1]
    if pattern.heads is None:
        return pattern.allowed(origin[2], origin[3], (t, s))
    heads = jnp.stack([pattern.of_head(n).allowed(origin[2], origin[3], (t, s)) for n in range(pattern.heads)])
    return lax.dynamic_slice_in_dim(heads, origin[1], h)


def _dropout_factor(record: TiledAttention, accumulate: Any) -> jax.Array | float:
    if record.dropout_prob == 0.0 or record.dropout_seed is None:
        return 1.0
    (b, t, h, _), s = record.query.shape, record.key.shape[1]
    origin = jnp.zeros(4, jnp.int32) if record.dropout_origin is None else record.dropout_origin
    batch, head, query, key = (jnp.arange(n, dtype=jnp.int32) + origin[i] for i, n in enumerate((b, h, t, s)))
    rows = dropout.row_keys(record.dropout_seed, batch[:, None, None], head[:, None], query)
    kept = dropout.keep(rows[..., None], key, record.dropout_prob)
    return kept.astype(accumulate) / (1.0 - record.dropout_prob)


def _repeat_heads(x: jax.Array, heads: int) -> jax.Array:
    return jnp.repeat(x, heads // x.shape[2], axis=2)


def requests(record: Any) -> tuple[dict[str, Any], ...]:
    """The owners of a record's entries: the segments of rows, or the rows."""
    if record.q_segment_ids is None:
        return ({"b": np.arange(record.query.shape[0])},)
    queries, keys = np.asarray(record.q_segment_ids), np.asarray(record.kv_segment_ids)
    owners = segment_owners(np.concatenate([queries, keys], axis=1))
    queries, keys = owners[:, : queries.shape[1]], owners[:, queries.shape[1] :]
    return ({"b t": queries, "b s": keys, "b t s": same_owner(queries[:, :, None], keys[:, None])},)


AXES = {
    "query": "b t h d",
    "key": "b s g d",
    "value": "b s g v",
    "bias": "b h t s",
    "mask": "b h t s",
    "q_segment_ids": "b t",
    "kv_segment_ids": "b s",
    "q_positions": "b t",
    "kv_positions": "b s",
    "softmax_aux": "h",
    "dropout_seed": "",
    "dropout_origin": "c",
    "output": "b t h v",
}

FAMILY = Family(
    name="tiled_attention",
    record=TiledAttention,
    differentiable=("query", "key", "value", "bias", "softmax_aux"),
    dtype=lambda record: record.query.dtype,
    head_dims=lambda record: (record.query.shape[-1], record.value.shape[-1]),
    axes=AXES,
    shardable="bthg",
    aligned=(("h", "g"),),
    localise=localise,
    reference=reference,
    requests=requests,
    isolate=Isolation(record=isolate_record, pullback=isolate_pullback, concerns=has_segments),
    lse="b h t",
)

MASKS = frozenset(
    {"mask", "q_segment_ids", "kv_segment_ids", "q_positions", "kv_positions", "causal", "sliding_window"}
)
SOFTMAX = frozenset({"softmax_aux", "logits_soft_cap"})
DROPOUT = frozenset({"dropout_seed", "dropout_origin", "dropout_prob"})
ROUNDING = frozenset({"normalize_output", "precision", "logits_dtype"})
"""Groups of optional fields, for backends to say which they handle."""
