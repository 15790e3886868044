"""One tile of the score matrix: loading its operands, its scores and what the masks allow.

Tile shapes: b batch rows, h KV heads, g query heads per KV head, t queries, s keys; d and v sizes.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.families.tiled_attention import FAR, TiledAttention, causal_window_bounds, round_to_logits_dtype
from ejkernel.planning import dropout
from ejkernel.planning.precision import product_precision
from ejkernel.types.sparse_masks import Mask, MultiHeadMask
from ejkernel_xla.rounded_products import rounded_product
from ejkernel_xla.tiled_attention.kernels.pair_functions import modify_scores, pairs_in_mask
from ejkernel_xla.tiled_attention.plan import OuterStep, TiledAxis, TilePlan, take


class Scores(NamedTuple):
    """Scores of a tile, [b, h, g, t, s].

    Attributes:
        value: What the softmax sees; -inf where not allowed.
        soft_cap_derivative: Derivative of the soft cap, None without it.
        allowed_mask: bool, broadcastable to the scores; None when all are.
        unmodified: The scores before `score_mod`; None without it.
    """

    value: jax.Array
    soft_cap_derivative: jax.Array | None
    allowed_mask: jax.Array | None
    unmodified: jax.Array | None


def accumulator(record: TiledAttention) -> Any:
    """Returns the dtype of scores, sums and products: float32, or float64 for float64 inputs."""
    return jnp.promote_types(record.query.dtype, jnp.float32)


def segment_ids(record: TiledAttention) -> tuple[jax.Array, jax.Array] | None:
    """Returns segment ids of queries and keys; None where they restrict nothing, which takes both sides."""
    if record.q_segment_ids is None or record.kv_segment_ids is None:
        return None
    return record.q_segment_ids, record.kv_segment_ids


def load_rows(x: jax.Array, record: TiledAttention, plan: TilePlan, at: OuterStep) -> jax.Array:
    """Returns [B, T, H, n] -> [b, h, g, t, n], the query tile's rows; padding rows are 0, whatever they hold."""
    b, h, g, t = plan.batch, plan.heads, plan.group, plan.queries.block
    tile = take(x, (at.batch, at.query, at.head * g, 0), (b, t, h * g, x.shape[3]))
    # Query heads of a KV head side by side: the product is one over t * g rows, and keys are not repeated.
    tile = tile.reshape(b, t, h, g, x.shape[3]).transpose(0, 2, 3, 1, 4)
    if (ids := segment_ids(record)) is not None:
        real = take(ids[0], (at.batch, at.query), (b, t)) >= 0
        # 0 instead of what padding holds: a weight of 0 times NaN would reach every key's gradient.
        tile = jnp.where(real[:, None, None, :, None], tile, 0)
    if record.mask is not None and record.mask.shape[1] == record.mask.shape[3] == 1:  # a mask of padding
        real = take(record.mask, (at.batch, 0, at.query, 0), (b, 1, t, 1))
        tile = jnp.where(real[:, :, None], tile, 0)
    return tile


def folds_scale(record: TiledAttention) -> bool:
    """Returns whether the query tile carries the scale: only where that does not round it to fewer bits than the
    scores.
    """
    return record.query.dtype == accumulator(record)


def load_query(record: TiledAttention, plan: TilePlan, at: OuterStep) -> jax.Array:
    """Returns [B, T, H, D] -> [b, h, g, t, d], times the softmax scale if `folds_scale`: that saves a pass over the
    scores.
    """
    rows = load_rows(record.query, record, plan, at)
    return rows * record.softmax_scale if folds_scale(record) else rows


def load_keys(x: jax.Array, record: TiledAttention, plan: TilePlan, at: OuterStep, tile: jax.Array) -> jax.Array:
    """Returns [B, S, Hk, n] -> [b, h, s, n], the key tile's rows; padding rows are 0, whatever they hold."""
    start, b, s = plan.keys.start(tile), plan.batch, plan.keys.block
    rows = take(x, (at.batch, start, at.head, 0), (b, s, plan.heads, x.shape[3])).transpose(0, 2, 1, 3)
    if (ids := segment_ids(record)) is not None:
        real = take(ids[1], (at.batch, start), (b, s)) >= 0
        # The same for keys and values, in both passes: 0 x NaN.
        rows = jnp.where(real[:, None, :, None], rows, 0)
    if record.mask is not None and record.mask.shape[1] == record.mask.shape[2] == 1:
        real = take(record.mask, (at.batch, 0, 0, start), (b, 1, 1, s))
        rows = jnp.where(real.swapaxes(2, 3), rows, 0)
    return rows


def load_heads(x: jax.Array, plan: TilePlan, at: OuterStep) -> jax.Array:
    """Returns [B, H, T] -> [b, h, g, t], one number per row of the query tile."""
    b, h, g, t = plan.batch, plan.heads, plan.group, plan.queries.block
    return take(x, (at.batch, at.head * g, at.query), (b, h * g, t)).reshape(b, h, g, t)


def load_pairs(x: jax.Array, plan: TilePlan, at: OuterStep, tile: jax.Array) -> jax.Array:
    """Returns [B|1, H|1, T|1, S|1] -> [b|1, h|1, g|1, t|1, s|1]; dimensions that broadcast stay so."""
    h, g = (plan.heads, plan.group) if x.shape[1] > 1 else (1, 1)
    starts = (at.batch, at.head * plan.group, at.query, plan.keys.start(tile))
    part = take(x, starts, (plan.batch, h * g, plan.queries.block, plan.keys.block))
    return part.reshape(part.shape[0], h, g, *part.shape[2:])


def dot(spec: str, a: jax.Array, b: jax.Array, record: TiledAttention) -> jax.Array:
    """Returns a product of two tiles at the record's precision, accumulated and returned in the accumulator's dtype."""
    exact = product_precision(record.query.dtype, record.precision)
    return jnp.einsum(spec, a, b, precision=exact, preferred_element_type=accumulator(record))


def compute_scores(
    record: TiledAttention, plan: TilePlan, at: OuterStep, tile: jax.Array, query: jax.Array, key: jax.Array
) -> Scores:
    """Returns scores of a query tile [b, h, g, t, d] and a key tile [b, h, s, d] before masking."""
    scores = dot("bhgtd,bhsd->bhgts", query, key, record)
    if not folds_scale(record):
        scores = scores * record.softmax_scale
    slope = None
    if record.bias is not None:
        scores = scores + load_pairs(record.bias, plan, at, tile).astype(scores.dtype)
    if record.relative_bias is not None:
        scores = scores + _bias_from_distance_table(record.relative_bias, record, plan, at, tile).astype(scores.dtype)
    if record.alibi_slopes is not None:
        scores = scores - _alibi_bias(record.alibi_slopes, record, plan, at, tile).astype(scores.dtype)
    if record.logits_soft_cap is not None:
        bounded, masked = jnp.tanh(scores / record.logits_soft_cap), scores == -jnp.inf
        scores, slope = record.logits_soft_cap * bounded, 1 - bounded * bounded
        # tanh(-inf) is -1, and what a bias of -inf hides would be attended to.
        if record.bias is not None or record.relative_bias is not None:
            scores = jnp.where(masked, -jnp.inf, scores)
    unmodified = scores
    if record.score_mod is not None:
        scores = modify_scores(record.score_mod, scores, record, plan, at, tile)
    # Rounded as a kernel that keeps its logits in that dtype rounds them, before masks.
    if record.logits_dtype != jnp.float32:
        scores = round_to_logits_dtype(record.logits_dtype, scores)
    return Scores(scores, slope, None, None if record.score_mod is None else unmodified)


def _alibi_bias(slopes: jax.Array, record: TiledAttention, plan: TilePlan, at: OuterStep, tile: jax.Array) -> jax.Array:
    """Returns slopes [B|1, H] times distances of positions, [b|1, h, g, t, s]: exact distances, whatever the length."""
    q = _positions(record.q_positions, plan.queries, at, plan.batch, at.tile)[:, None, None, :, None]
    k = _positions(record.kv_positions, plan.keys, at, plan.batch, tile)[:, None, None, None, :]
    heads = take(slopes, (at.batch, at.head * plan.group), (plan.batch, plan.heads * plan.group))
    heads = heads.reshape(-1, plan.heads, plan.group, 1, 1).astype(accumulator(record))
    return rounded_product(heads, jnp.abs(k - q).astype(heads.dtype))


def distance_entries(
    table: jax.Array, record: TiledAttention, plan: TilePlan, at: OuterStep, tile: jax.Array
) -> jax.Array:
    """Returns the index of the entry of a table [H, n] that each diagonal of a tile has, int32 [t + s - 1].

    The lowest distance comes first.
    """
    t, s, farthest = plan.queries.block, plan.keys.block, table.shape[1] // 2
    first = plan.keys.start(tile) + _dropout_origin(record, 3) - (at.query + _dropout_origin(record, 2) + t - 1)
    distance = first + jnp.arange(t + s - 1, dtype=jnp.int32)
    return farthest + jnp.clip(distance, -farthest, farthest)


def relative_distances(table: jax.Array, record: TiledAttention, plan: TilePlan, at: OuterStep, tile: jax.Array) -> Any:
    """Returns which entry of a table [H, n] each diagonal of a tile has: one-hot [n, t + s - 1].

    A product with its transpose adds to the table, in the same order in every run.
    """
    entry = distance_entries(table, record, plan, at, tile)
    return (jnp.arange(table.shape[1], dtype=jnp.int32)[:, None] == entry).astype(accumulator(record))


def _bias_from_distance_table(
    table: jax.Array, record: TiledAttention, plan: TilePlan, at: OuterStep, tile: jax.Array
) -> jax.Array:
    """Returns the bias of a tile, [1, h, g, t, s], from a table [H, n] of distances."""
    t, s, heads = plan.queries.block, plan.keys.block, plan.heads * plan.group
    rows = take(table, (at.head * plan.group, 0), (heads, table.shape[1])).astype(accumulator(record))
    # Read, not multiplied by zeros and ones: an entry of -inf masks its distance alone.
    diagonals = rows[:, distance_entries(table, record, plan, at, tile)]
    # Row i of the tile has the diagonals from t - 1 - i on: copies of t + s entries, read t + s - 1 at a time, shift.
    repeated = jnp.tile(jnp.pad(diagonals, ((0, 0), (0, 1))), (1, t))
    shifted = repeated[:, : t * (t + s - 1)].reshape(heads, t, t + s - 1)
    return shifted[:, :, t - 1 :].reshape(1, plan.heads, plan.group, t, s)


def mask(scores: Scores, allowed: jax.Array | None) -> Scores:
    """Returns scores with -inf where not allowed."""
    if allowed is None:
        return scores
    return scores._replace(value=jnp.where(allowed, scores.value, -jnp.inf), allowed_mask=allowed)


def allowed_pairs(record: TiledAttention, plan: TilePlan, at: OuterStep, tile: jax.Array) -> jax.Array | None:
    """Returns what the masks allow in a tile, bool broadcastable to [b, h, g, t, s]; None when nothing restricts it."""
    terms = []
    if causal_window_bounds(record) != (None, None):
        terms.append(_in_band(record, plan, at, tile))
    if (ids := segment_ids(record)) is not None:
        q = take(ids[0], (at.batch, at.query), (plan.batch, plan.queries.block))
        k = take(ids[1], (at.batch, plan.keys.start(tile)), (plan.batch, plan.keys.block))
        # Padding gets an id that the other side does not have, so that one comparison per pair is enough.
        q, k = jnp.where(q < 0, -1, q), jnp.where(k < 0, -2, k)
        terms.append(q[:, None, None, :, None] == k[:, None, None, None, :])
    if record.mask is not None:
        terms.append(load_pairs(record.mask, plan, at, tile))
    if record.mask_mod is not None:
        terms.append(pairs_in_mask(record.mask_mod, plan, at, tile, record.dropout_origin))
    if record.pattern is not None:
        terms.append(_in_pattern(record, record.pattern, plan, at, tile))
    if plan.keys.has_overlapping_tiles:
        terms.append(plan.keys.fresh(tile))
    return functools.reduce(jnp.logical_and, terms) if terms else None


def _in_band(record: TiledAttention, plan: TilePlan, at: OuterStep, tile: jax.Array) -> jax.Array:
    """Returns whether positions are within the band, bool [b|1, 1, 1, t, s]."""
    left, right = causal_window_bounds(record)
    q = _positions(record.q_positions, plan.queries, at, plan.batch, at.tile)[:, None, None, :, None]
    k = _positions(record.kv_positions, plan.keys, at, plan.batch, tile)[:, None, None, None, :]
    if record.q_positions is None and record.kv_positions is None:
        # One unsigned comparison of `k - q + low` to `low + high`: comparing the loop counters themselves keeps LLVM
        # from vectorising the exp that this is fused into. Given positions could overflow it, indices cannot.
        low, high = FAR if left is None else left, FAR if right is None else right
        return (k - q + low).astype(jnp.uint32) <= jnp.uint32(low + high)
    return jnp.logical_and(left is None or k >= q - left, right is None or k <= q + right)


def _in_pattern(record: TiledAttention, pattern: Mask, plan: TilePlan, at: OuterStep, tile: jax.Array) -> jax.Array:
    """Returns whether pairs are in the pattern, bool broadcastable to [b, h, g, t, s]."""
    sizes = (plan.queries.block, plan.keys.block)
    query, key = at.query + _dropout_origin(record, 2), plan.keys.start(tile) + _dropout_origin(record, 3)
    if not isinstance(pattern, MultiHeadMask):
        return pattern.allowed(query, key, sizes)
    heads = at.head * plan.group + _dropout_origin(record, 1) + jnp.arange(plan.heads * plan.group, dtype=jnp.int32)
    branches = [functools.partial(mask.allowed, query, key, sizes) for mask in pattern.distinct_masks]
    which = jnp.asarray(pattern.mask_index_by_head, jnp.int32)[heads]
    # One head at a time: under vmap a switch would compute every branch for every head.
    allowed = lax.map(lambda n: lax.switch(n, branches), which)
    return allowed.reshape(plan.heads, plan.group, *sizes)


def dropout_rows(record: TiledAttention, plan: TilePlan, at: OuterStep) -> jax.Array | None:
    """Returns the dropout key of every row, uint32 [b, h, g, t]; None when nothing is dropped."""
    if record.dropout_prob == 0.0 or record.dropout_seed is None:
        return None
    sizes = (plan.batch, plan.heads * plan.group, plan.queries.block)
    starts = (at.batch, at.head * plan.group, at.query)
    batch, head, query = (
        jnp.arange(n, dtype=jnp.int32) + start + _dropout_origin(record, d)
        for d, (n, start) in enumerate(zip(sizes, starts, strict=True))
    )
    rows = dropout.row_keys(record.dropout_seed, batch[:, None, None], head[:, None], query)
    return rows.reshape(plan.batch, plan.heads, plan.group, plan.queries.block)


def drop_weights(weights: jax.Array, rows: jax.Array | None, record: TiledAttention, start: jax.Array) -> jax.Array:
    """Returns weights [b, h, g, t, s] of the keys from `start` on with the dropped ones at 0 and the
    others scaled up.
    """
    if rows is None:
        return weights
    keys = jnp.arange(weights.shape[-1], dtype=jnp.int32) + start + _dropout_origin(record, 3)
    kept = dropout.is_kept(rows[..., None], keys, record.dropout_prob)
    return jnp.where(kept, weights * (1.0 / (1.0 - record.dropout_prob)), 0)


def _dropout_origin(record: TiledAttention, dimension: int) -> jax.Array | int:
    return 0 if record.dropout_origin is None else record.dropout_origin[dimension].astype(jnp.int32)


def _positions(positions: jax.Array | None, axis: TiledAxis, at: OuterStep, rows: int, tile: jax.Array) -> jax.Array:
    """Returns positions of a tile, int32 [b|1, block]."""
    if positions is None:
        return (axis.start(tile) + jnp.arange(axis.block, dtype=jnp.int32))[None]
    return take(positions, (at.batch, axis.start(tile)), (rows, axis.block))


def head_sinks(record: TiledAttention, plan: TilePlan, at: OuterStep) -> jax.Array | None:
    """Returns sink logits of a tile's heads, [h, g, 1]."""
    if record.softmax_aux is None:
        return None
    sinks = lax.dynamic_slice(record.softmax_aux, (at.head * plan.group,), (plan.heads * plan.group,))
    return sinks.astype(accumulator(record)).reshape(plan.heads, plan.group, 1)
