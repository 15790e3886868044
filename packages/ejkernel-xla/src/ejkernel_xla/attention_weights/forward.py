"""Forward pass of attention with its weights: for a tile of queries and all keys,

    s   = masked scores
    lse = log(exp(sink) + sum_j exp(s_j))
    w   = dropout(exp(s - lse))
    o   = w v

The weights are an output, [T, S] a head, so a tile has whole rows of them and no online softmax.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.families.attention_weights import OutputAndWeights
from ejkernel.families.tiled_attention import SoftmaxResiduals, TiledAttention
from ejkernel_xla.attention_weights.config import WeightRows, plan_rows
from ejkernel_xla.tiled_attention.forward import finite
from ejkernel_xla.tiled_attention.kernels.scores import (
    Scores,
    accumulator,
    allowed_pairs,
    compute_scores,
    dot,
    drop_weights,
    dropout_rows,
    head_sinks,
    load_keys,
    load_query,
    mask,
)
from ejkernel_xla.tiled_attention.plan import OuterStep, TilePlan, put

ONLY_KEY_TILE: Any = 0
"""The one tile of keys."""


class State(NamedTuple):
    """The arrays that query tiles are stored into: output [B, T, H, Dv], weights [B, H, T, S] and lse [B, H, T]."""

    output: jax.Array
    weights: jax.Array
    lse: jax.Array


def forward(record: TiledAttention, config: WeightRows) -> tuple[OutputAndWeights, SoftmaxResiduals]:
    """Returns output, weights and residuals of a record.

    Args:
        record: The canonical arguments.
        config: Rows of the weights a step.

    Returns:
        Output [B, T, H, Dv] and weights [B, H, T, S] in the query's dtype, and the residuals for the backward pass.
    """
    (b, t, h, _), (_, s, _, v), dtype = record.query.shape, record.value.shape, record.query.dtype
    shapes = ((b, t, h, v), dtype), ((b, h, t, s), dtype), ((b, h, t), accumulator(record))
    state = State(*(jnp.zeros(*shape) for shape in shapes))
    if state.weights.size:
        plan = plan_rows(record, config)

        def step(n: jax.Array, state: State) -> State:
            return _query_tile(record, plan, plan.outer_step(n), state)

        state = lax.fori_loop(jnp.int32(0), jnp.int32(plan.steps), step, state)
    return (state.output, state.weights), SoftmaxResiduals(lse=state.lse)


def _query_tile(record: TiledAttention, plan: TilePlan, at: OuterStep, state: State) -> State:
    key, value = (load_keys(x, record, plan, at, ONLY_KEY_TILE) for x in (record.key, record.value))
    scores = row_scores(record, plan, at, load_query(record, plan, at), key)
    lse = _log_sum_exp(record, plan, at, scores.value)
    weights = drop_weights(
        jnp.exp(scores.value - finite(lse)[..., None]), dropout_rows(record, plan, at), record, ONLY_KEY_TILE
    )
    output = dot("bhgts,bhsv->bhgtv", weights.astype(value.dtype), value, record)
    b, heads, t = plan.batch, plan.heads * plan.group, plan.queries.block
    head = at.head * plan.group
    return State(
        put(state.output, (at.batch, at.query, head, 0), output.transpose(0, 3, 1, 2, 4).reshape(b, t, heads, -1)),
        put(state.weights, (at.batch, head, at.query, 0), weights.reshape(b, heads, t, -1)),
        put(state.lse, (at.batch, head, at.query), lse.reshape(b, heads, t)),
    )


def row_scores(record: TiledAttention, plan: TilePlan, at: OuterStep, query: jax.Array, key: jax.Array) -> Scores:
    """Returns scores of a query tile [b, h, g, t, d] and all keys [b, h, S, d], masked."""
    return mask(
        compute_scores(record, plan, at, ONLY_KEY_TILE, query, key), allowed_pairs(record, plan, at, ONLY_KEY_TILE)
    )


def _log_sum_exp(record: TiledAttention, plan: TilePlan, at: OuterStep, scores: jax.Array) -> jax.Array:
    """Returns log-sum-exp of the rows [b, h, g, t], the sink included; -inf where nothing attends."""
    row_max = jnp.max(scores, axis=-1)
    sink = head_sinks(record, plan, at)
    row_max = finite(row_max if sink is None else jnp.maximum(row_max, sink))
    row_sum = jnp.sum(jnp.exp(scores - row_max[..., None]), axis=-1)
    if sink is not None:
        row_sum = row_sum + jnp.exp(sink - row_max)
    return jnp.where(row_sum > 0, jnp.log(jnp.where(row_sum > 0, row_sum, 1)) + row_max, -jnp.inf)
