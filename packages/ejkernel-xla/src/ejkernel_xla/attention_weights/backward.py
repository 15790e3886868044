"""Backward pass of attention with its weights, by recomputation of the scores.

With p = exp(s - lse), do the output's cotangent and dw the weights':

    dv_j    = sum_i dropout_ij p_ij do_i
    dp_ij   = dropout_ij (<do_i, v_j> + dw_ij)
    delta_i = sum_j p_ij dp_ij
    ds_ij   = p_ij (dp_ij - delta_i)
    dbias   = ds through the soft cap
    dq_i    = scale sum_j dbias_ij k_j
    dk_j    = scale sum_i dbias_ij q_i
    dsink_h = -sum_i exp(sink_h - lse_i) delta_i
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.families.tiled_attention import TiledAttention
from ejkernel.types.pullback import Pullback
from ejkernel_xla.attention_weights.config import WeightRows, plan_rows
from ejkernel_xla.attention_weights.forward import ONLY_KEY_TILE, row_scores
from ejkernel_xla.tiled_attention.forward import finite
from ejkernel_xla.tiled_attention.kernels.scores import (
    accumulator,
    dot,
    drop_weights,
    dropout_rows,
    folds_scale,
    head_sinks,
    load_heads,
    load_keys,
    load_pairs,
    load_query,
    load_rows,
)
from ejkernel_xla.tiled_attention.plan import OuterStep, TilePlan, add

Gradients = dict[str, jax.Array]


class WeightsTile(NamedTuple):
    """A query tile, differentiated up to its scores.

    Attributes:
        query: [b, h, g, t, d], as `load_query` gives it.
        key: [b, h, S, d].
        cotangent: [b, h, g, t, v] of the output.
        dropped_weights: [b, h, g, t, S], the weights.
        dscores: [b, h, g, t, S], gradient of the scaled and biased scores.
        lse: [b, h, g, t].
        delta: [b, h, g, t].
    """

    query: jax.Array
    key: jax.Array
    cotangent: jax.Array
    dropped_weights: jax.Array
    dscores: jax.Array
    lse: jax.Array
    delta: jax.Array


def backward(pullback: Pullback, config: WeightRows) -> Gradients:
    """Returns gradients of the requested fields of a record.

    Args:
        pullback: Record, residuals, the cotangents of output and weights, and the wanted names, of query, key, value,
            bias and softmax_aux.
        config: Rows of the weights a step.

    Returns:
        Each requested gradient, in its field's shape and dtype.
    """
    record = pullback.record
    fields = {name: getattr(record, name) for name in sorted(pullback.grad_fields)}
    grads = {name: jnp.zeros(x.shape, accumulator(record)) for name, x in fields.items()}
    if record.query.size and record.key.size and grads:
        plan = plan_rows(record, config)

        def step(n: jax.Array, grads: Gradients) -> Gradients:
            at = plan.outer_step(n)
            return _add_tile_gradients(grads, _differentiate_query_tile(pullback, plan, at), record, plan, at)

        grads = lax.fori_loop(jnp.int32(0), jnp.int32(plan.steps), step, grads)
    return {name: grads[name].astype(x.dtype) for name, x in fields.items()}


def _differentiate_query_tile(pullback: Pullback, plan: TilePlan, at: OuterStep) -> WeightsTile:
    record, dtype = pullback.record, accumulator(pullback.record)
    query = load_query(record, plan, at)
    key, value = (load_keys(x, record, plan, at, ONLY_KEY_TILE) for x in (record.key, record.value))
    cotangent, dweights = load_rows(pullback.cotangent[0], record, plan, at), _weight_cotangent(pullback, plan, at)
    if plan.queries.has_overlapping_tiles:  # rows that the tile shares with the tile before contribute once
        fresh = plan.queries.fresh(at.tile)[:, None]
        cotangent, dweights = jnp.where(fresh, cotangent, 0), jnp.where(fresh, dweights, 0)
    scores = row_scores(record, plan, at, query, key)
    lse, rows = finite(load_heads(pullback.residuals.lse, plan, at)), dropout_rows(record, plan, at)
    weights = jnp.exp(scores.value - lse[..., None])
    dweights = drop_weights(
        dot("bhgtv,bhsv->bhgts", cotangent, value, record) + dweights.astype(dtype), rows, record, ONLY_KEY_TILE
    )
    if scores.allowed_mask is not None:  # of pairs that do not attend, the cotangent may be anything
        # Their weights are replaced, too: lse is NaN in rows that are not finite.
        dweights, weights = jnp.where(scores.allowed_mask, dweights, 0), jnp.where(scores.allowed_mask, weights, 0)
    # Computes delta from the weights, because it includes the cotangent of the weights; <do, o> lacks that term.
    delta = jnp.sum(weights * dweights, axis=-1)
    dscores = weights * (dweights - delta[..., None])
    if scores.soft_cap_derivative is not None:
        dscores = dscores * scores.soft_cap_derivative
    if scores.allowed_mask is not None:
        dscores = jnp.where(scores.allowed_mask, dscores, 0)
    return WeightsTile(query, key, cotangent, drop_weights(weights, rows, record, ONLY_KEY_TILE), dscores, lse, delta)


def _weight_cotangent(pullback: Pullback, plan: TilePlan, at: OuterStep) -> jax.Array:
    """Returns the cotangent of a query tile's weights, [b, h, g, t, S]."""
    tile = load_pairs(pullback.cotangent[1], plan, at, ONLY_KEY_TILE)
    return tile.reshape(plan.batch, plan.heads, plan.group, plan.queries.block, plan.keys.length)


def _add_tile_gradients(
    grads: Gradients, rows: WeightsTile, record: TiledAttention, plan: TilePlan, at: OuterStep
) -> Gradients:
    """Returns the gradients with what a query tile adds to them."""
    b, h, g, t, s = rows.dscores.shape
    grads, head, keys = dict(grads), at.head * g, (at.batch, 0, at.head, 0)
    if "value" in grads:
        dropped = rows.dropped_weights.astype(rows.cotangent.dtype)
        grads["value"] = add(grads["value"], keys, dot("bhgts,bhgtv->bshv", dropped, rows.cotangent, record))
    if "bias" in grads:
        grads["bias"] = add(grads["bias"], (at.batch, head, at.query, 0), rows.dscores.reshape(b, h * g, t, s))
    dscores = (rows.dscores if folds_scale(record) else rows.dscores * record.softmax_scale).astype(rows.key.dtype)
    if "query" in grads:
        tile = dot("bhgts,bhsd->bthgd", dscores, rows.key, record).reshape(b, t, h * g, -1)
        tile = tile * record.softmax_scale if folds_scale(record) else tile
        grads["query"] = add(grads["query"], (at.batch, at.query, head, 0), tile)
    if "key" in grads:
        grads["key"] = add(grads["key"], keys, dot("bhgts,bhgtd->bshd", dscores, rows.query, record))
    sink = head_sinks(record, plan, at)
    if "softmax_aux" in grads and sink is not None:
        share = jnp.exp(sink - rows.lse) * rows.delta
        grads["softmax_aux"] = add(grads["softmax_aux"], (head,), -share.sum(axis=(0, 3)).reshape(-1))
    return grads
