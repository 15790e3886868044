"""Backward pass of tiled softmax attention, by recomputation of the scores (Dao et al. 2022).

With p = exp(s - lse), do and dlse the cotangents of output and lse, and delta_i = <do_i, o_i> - dlse_i:

    dv_j    = sum_i dropout_ij p_ij do_i
    dp_ij   = dropout_ij <do_i, v_j>
    ds_ij   = p_ij (dp_ij - delta_i)
    dbias   = ds through score_mod and the soft cap; that of relative_bias is summed over the pairs of a distance
    dq_i    = scale sum_j dbias_ij k_j
    dk_j    = scale sum_i dbias_ij q_i
    dsink_h = -sum_i exp(sink_h - lse_i) delta_i

An output that is not normalised has p = exp(s - row_max) instead, ds_ij = p_ij dp_ij - [j = argmax_i] delta_i and no
gradient of the sink: subtracting the maximum is part of its meaning. Its lse is differentiated in a pass of its own.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel import _compat
from ejkernel.families.tiled_attention import TiledAttention, unnormalised_gradients
from ejkernel.types.pullback import Pullback
from ejkernel_xla.tiled_attention.config import ChunkedSoftmax
from ejkernel_xla.tiled_attention.forward import finite
from ejkernel_xla.tiled_attention.kernels.key_tiles import find_key_tiles
from ejkernel_xla.tiled_attention.kernels.pair_functions import pull_back_scores
from ejkernel_xla.tiled_attention.kernels.scores import (
    Scores,
    accumulator,
    allowed_pairs,
    compute_scores,
    dot,
    drop_weights,
    dropout_rows,
    folds_scale,
    load_heads,
    load_keys,
    load_query,
    load_rows,
    relative_distances,
)
from ejkernel_xla.tiled_attention.plan import OuterStep, TilePlan, add, make_plan

Gradients = dict[str, jax.Array]


class QueryTile(NamedTuple):
    """A query tile's operands, the same for every key tile.

    Attributes:
        query: [b, h, g, t, d], as `load_query` gives it.
        cotangent: [b, h, g, t, v] of the output.
        shift: [b, h, g, t], subtracted from the scores: lse, or the maximum of outputs that are not normalised.
        delta: [b, h, g, t], <cotangent, output>, less the cotangent of lse.
        row_argmax: [b, h, g, t] int32, key of the maximum; None for normalised outputs.
        dropout: uint32 [b, h, g, t] row keys, or None.
    """

    query: jax.Array
    cotangent: jax.Array
    shift: jax.Array
    delta: jax.Array
    row_argmax: jax.Array | None
    dropout: jax.Array | None


def backward(pullback: Pullback, params: ChunkedSoftmax) -> Gradients:
    """Returns gradients of the requested fields of a record.

    Args:
        pullback: Record, residuals, output and its cotangent, and the requested names, of query, key, value, bias,
            relative_bias, score_mod and softmax_aux.
        params: Tile sizes.

    Returns:
        Each requested gradient, in its field's shape and dtype.
    """
    record = pullback.record
    if pullback.lse_cotangent is not None and not record.normalize_output:
        return unnormalised_gradients(backward, pullback, params)
    fields = {name: getattr(record, name) for name in sorted(pullback.grad_fields)}
    # The gradient of a query is complete after its tile; the other gradients are sums over query tiles.
    wide = accumulator(record)
    grads = {name: zero_gradient(x, x.dtype if name == "query" else wide) for name, x in fields.items()}
    grads = accumulate(pullback, params, grads)
    return {name: as_dtype_of(x, grads[name]) for name, x in fields.items()}


def zero_gradient(field: Any, dtype: Any) -> Any:
    """Returns zeros for the gradient of a field, an array or a function with arrays."""
    return jax.tree.map(functools.partial(_zeros, dtype=dtype), field)


def as_dtype_of(field: Any, gradient: Any) -> Any:
    """Returns the gradient of a field in the field's dtype."""
    return jax.tree.map(_as_dtype_of, field, gradient)


def _zeros(x: jax.Array, dtype: Any) -> jax.Array | None:
    """Returns zeros for the gradient of an array; None for the integers of a function, which have none."""
    return jnp.zeros(x.shape, dtype) if jnp.issubdtype(x.dtype, jnp.floating) else None


def _as_dtype_of(x: jax.Array, gradient: jax.Array | None) -> jax.Array | None:
    return None if gradient is None else gradient.astype(x.dtype)


def accumulate(pullback: Pullback, params: ChunkedSoftmax, grads: Gradients) -> Gradients:
    """Adds the gradients of a record to the given ones, in whose dtypes they stay."""
    record = pullback.record
    if not (record.query.size and record.key.size and grads):
        return grads
    return _gradients_over_query_tiles(
        pullback, make_plan(record, params.block_q, params.block_kv), _compat.as_varying(grads, pullback)
    )


def _gradients_over_query_tiles(pullback: Pullback, plan: TilePlan, grads: Gradients) -> Gradients:
    record, key_tiles = pullback.record, find_key_tiles(pullback.record, plan)

    def query_tile(step: jax.Array, grads: Gradients) -> Gradients:
        at = plan.outer_step(step)
        rows = _load_query_tile(pullback, plan, at)
        # dq is complete after the key loop and stays a tile; dk and dv are whole arrays, updated in place.
        carry = {name: x for name, x in grads.items() if name not in ("query", "softmax_aux")}
        if "query" in grads:
            carry["query"] = _compat.as_varying(jnp.zeros(rows.query.shape, accumulator(record)), pullback)

        def key_tile(tile: jax.Array, carry: Gradients, masked: bool) -> Gradients:
            return _add_key_tile_gradients(record, plan, at, tile, rows, carry, masked)

        carry = key_tiles.fold_key_tiles(
            at,
            lambda tile, carry: key_tile(tile, carry, False),
            lambda tile, carry: key_tile(tile, carry, True),
            carry,
        )
        return _store_query_tile_gradients(grads, carry, record, plan, at, rows)

    return lax.fori_loop(jnp.int32(0), jnp.int32(plan.steps), query_tile, grads)


def _load_query_tile(pullback: Pullback, plan: TilePlan, at: OuterStep) -> QueryTile:
    record, residuals, dtype = pullback.record, pullback.residuals, accumulator(pullback.record)
    query = load_query(record, plan, at)
    cotangent, output = (load_rows(x, record, plan, at) for x in (pullback.cotangent, pullback.output))
    if plan.queries.has_overlapping_tiles:  # rows that the tile shares with the tile before contribute once
        cotangent = jnp.where(plan.queries.fresh(at.tile)[:, None], cotangent, 0)
    # From the output instead of from weights and their gradients: a sum over Dv, and not over all keys.
    delta = jnp.sum(cotangent.astype(dtype) * output.astype(dtype), axis=-1)
    if pullback.lse_cotangent is not None:
        delta = delta - _load_lse_cotangent(pullback, plan, at)
    shift = load_heads(residuals.lse if record.normalize_output else residuals.row_max, plan, at)
    row_argmax = None if record.normalize_output else load_heads(residuals.row_argmax, plan, at)
    return QueryTile(query, cotangent, finite(shift), delta, row_argmax, dropout_rows(record, plan, at))


def _load_lse_cotangent(pullback: Pullback, plan: TilePlan, at: OuterStep) -> jax.Array:
    """Returns [b, h, g, t]; 0 for rows with nothing to attend, and for those that an earlier tile had."""
    cotangent, lse = (load_heads(x, plan, at) for x in (pullback.lse_cotangent, pullback.residuals.lse))
    counted = lse > -jnp.inf
    return jnp.where(
        counted & plan.queries.fresh(at.tile) if plan.queries.has_overlapping_tiles else counted, cotangent, 0
    )


def _add_key_tile_gradients(
    record: TiledAttention,
    plan: TilePlan,
    at: OuterStep,
    tile: jax.Array,
    rows: QueryTile,
    grads: Gradients,
    is_masked: bool,
) -> Gradients:
    """Adds what one tile pair contributes to the gradients (the query's: [b, h, g, t, d], of its tile alone)."""
    start = plan.keys.start(tile)
    key, value = (load_keys(x, record, plan, at, tile) for x in (record.key, record.value))
    scores = compute_scores(record, plan, at, tile, rows.query, key)
    # Normalised where the shift is lse: neither the maximum nor the row sum is made again.
    weights = jnp.exp(scores.value - rows.shift[..., None])
    if is_masked and (pairs := allowed_pairs(record, plan, at, tile)) is not None:
        # Masked after the exponential, which is NaN in all of a row whose shift is: it is replaced, not multiplied.
        weights, scores = jnp.where(pairs, weights, 0), scores._replace(allowed_mask=pairs)
    where, grads = (at.batch, start, at.head, 0), dict(grads)
    if "value" in grads:
        dropped = drop_weights(weights, rows.dropout, record, start).astype(rows.cotangent.dtype)
        # XLA adds to the slice of the carry in place; a key tile's gradient is float32 until all queries have added.
        dv = dot("bhgts,bhgtv->bshv", dropped, rows.cotangent, record)
        grads["value"] = add(grads["value"], where, dv)
    if not grads.keys() - {"value"}:
        return grads
    dscores = _score_gradient(record, rows, value, weights, scores, start)
    dscores = _add_gradients_of_terms(record, plan, at, tile, scores, dscores, grads)
    # Otherwise the query tile carries the scale: dk has it by the product, and dq gets it once per tile in
    # `_store_query_tile_gradients`.
    if not folds_scale(record):
        dscores = dscores * record.softmax_scale
    dscores = dscores.astype(key.dtype)
    if "query" in grads:
        grads["query"] = grads["query"] + dot("bhgts,bhsd->bhgtd", dscores, key, record)
    if "key" in grads:
        grads["key"] = add(grads["key"], where, dot("bhgts,bhgtd->bshd", dscores, rows.query, record))
    return grads


def _add_gradients_of_terms(
    record: TiledAttention,
    plan: TilePlan,
    at: OuterStep,
    tile: jax.Array,
    scores: Scores,
    dscores: jax.Array,
    grads: Gradients,
) -> jax.Array:
    """Adds the gradients of score_mod, bias and relative_bias to `grads`, and returns that of the scaled scores, [b, h,
    g, t, s].

    `dscores` is the gradient of the scores that the softmax sees.
    """
    start = plan.keys.start(tile)
    if scores.unmodified is not None:
        dscores, captured = pull_back_scores(scores.unmodified, dscores, record, plan, at, tile)
        grads |= _add_captured(grads, captured)
    dscores = _pull_back_soft_cap(scores, dscores)
    if "bias" in grads:
        grads["bias"] = _add_bias(grads["bias"], dscores, plan, at, start)
    if "relative_bias" in grads:
        grads["relative_bias"] = _add_relative_bias(grads["relative_bias"], dscores, record, plan, at, tile)
    return dscores


def _score_gradient(
    record: TiledAttention, rows: QueryTile, value: jax.Array, weights: jax.Array, scores: Scores, start: jax.Array
) -> jax.Array:
    """Returns gradient of the scores that the softmax sees, [b, h, g, t, s]."""
    dweights = drop_weights(dot("bhgtv,bhsv->bhgts", rows.cotangent, value, record), rows.dropout, record, start)
    delta = rows.delta[..., None]
    if rows.row_argmax is None:
        dscores = weights * (dweights - delta)
    else:
        keys = start + jnp.arange(weights.shape[-1], dtype=jnp.int32)
        dscores = weights * dweights - jnp.where(keys == rows.row_argmax[..., None], delta, 0)
    # Weights of masked pairs are 0, but dp may be inf there, and 0 x inf is NaN.
    return dscores if scores.allowed_mask is None else jnp.where(scores.allowed_mask, dscores, 0)


def _pull_back_soft_cap(scores: Scores, dscores: jax.Array) -> jax.Array:
    """Returns gradient of the scaled and biased scores, [b, h, g, t, s]."""
    if scores.soft_cap_derivative is None and scores.unmodified is None:
        return dscores
    if scores.soft_cap_derivative is not None:
        dscores = dscores * scores.soft_cap_derivative
    # A gradient of 0 times a slope of inf is NaN.
    return dscores if scores.allowed_mask is None else jnp.where(scores.allowed_mask, dscores, 0)


def _add_captured(grads: Gradients, gradients: tuple[jax.Array | None, ...]) -> Gradients:
    """Returns the gradient of `score_mod`, if it is requested, with `gradients` added; those of integer arrays are
    None.
    """
    if "score_mod" not in grads:
        return {}
    function: Any = grads["score_mod"]
    added = jax.tree.map(lambda total, x: total + x.astype(total.dtype), function.captured, gradients)
    return {"score_mod": dataclasses.replace(function, captured=added)}


def _add_bias(bias: jax.Array, dscores: jax.Array, plan: TilePlan, at: OuterStep, start: jax.Array) -> jax.Array:
    b, h, g, t, s = dscores.shape
    return add(bias, (at.batch, at.head * plan.group, at.query, start), dscores.reshape(b, h * g, t, s))


def _add_relative_bias(
    table: jax.Array, dscores: jax.Array, record: TiledAttention, plan: TilePlan, at: OuterStep, tile: jax.Array
) -> jax.Array:
    """Adds the sums of a tile's diagonals to the gradient of the table [H, n]."""
    _, h, g, t, s = dscores.shape
    rows = dscores.sum(axis=0).reshape(h * g, t, s)
    # This inverts the layout change of the scores: rows that are each shifted by one more put a diagonal into a column.
    shifted = jnp.pad(rows, ((0, 0), (0, 0), (t - 1, 0))).reshape(h * g, t * (t + s - 1))
    columns = jnp.pad(shifted, ((0, 0), (0, t))).reshape(h * g, t, t + s)
    entries = relative_distances(table, record, plan, at, tile)
    sums = jnp.einsum("hd,nd->hn", columns[:, :, : t + s - 1].sum(axis=1), entries, precision=lax.Precision.HIGHEST)
    return add(table, (at.head * plan.group, 0), sums)


def _store_query_tile_gradients(
    grads: Gradients, carry: dict[str, Any], record: TiledAttention, plan: TilePlan, at: OuterStep, rows: QueryTile
) -> Gradients:
    """Returns the gradients with a finished query tile in them."""
    b, h, g, t = rows.delta.shape
    grads, head = {**grads, **{name: x for name, x in carry.items() if name != "query"}}, at.head * g
    if "query" in grads:
        tile = carry["query"] * record.softmax_scale if folds_scale(record) else carry["query"]
        tile = tile.transpose(0, 3, 1, 2, 4).reshape(b, t, h * g, -1)
        # Added: in rows that an earlier tile had, this tile's gradient is 0.
        grads["query"] = add(grads["query"], (at.batch, at.query, head, 0), tile)
    if "softmax_aux" in grads and record.softmax_aux is not None and record.normalize_output:
        sink = lax.dynamic_slice(record.softmax_aux, (head,), (h * g,)).reshape(h, g, 1)
        # The sink's weight times its ds, whose dp is 0. It needs no tile of scores.
        share = jnp.exp(sink.astype(rows.shift.dtype) - rows.shift) * rows.delta
        grads["softmax_aux"] = add(grads["softmax_aux"], (head,), -share.sum(axis=(0, 3)).reshape(-1))
    return grads
