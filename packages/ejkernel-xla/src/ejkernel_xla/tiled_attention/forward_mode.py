"""Forward pass of tiled softmax attention with its tangents, in one loop over the tiles.

With p, m, l and o of the forward pass, and ds the tangents of the scores, a key tile adds

    c  = exp(m - m') c  + rowsum(p ds)
    do = exp(m - m') do + dropout(p ds) v + dropout(p) dv

and at the end, with w the weight of the sink, `dlse = exp(m - lse) c + w dsink` and `doutput = exp(m - lse) do - output
dlse`. The maximum has no tangent: it cancels. Memory holds one tile of scores and one of their tangents.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel import _compat
from ejkernel.families.tiled_attention import SoftmaxResiduals, TiledAttention
from ejkernel_xla.tiled_attention.config import ChunkedSoftmax
from ejkernel_xla.tiled_attention.forward import (
    OnlineSoftmax,
    epilogue,
    finite,
    forward,
    initial_softmax,
    output_and_residuals,
    results_without_keys,
    store_query_tile,
)
from ejkernel_xla.tiled_attention.kernels.key_tiles import find_key_tiles
from ejkernel_xla.tiled_attention.kernels.scores import (
    allowed_pairs,
    compute_scores,
    dot,
    drop_weights,
    dropout_rows,
    head_sinks,
    load_keys,
    load_query,
)
from ejkernel_xla.tiled_attention.plan import OuterStep, TilePlan, make_plan

Fields = dict[str, Any]
Results = tuple[jax.Array, SoftmaxResiduals]


class Tangents(NamedTuple):
    """Online softmax of a query tile with its tangents.

    Attributes:
        softmax: That of the forward pass.
        row_sum: [b, h, g, t], sum of exp(score - row_max) times the score's tangent.
        acc: [b, h, g, t, v], sum of the numerator's tangents, with the maximum held.
    """

    softmax: OnlineSoftmax
    row_sum: jax.Array
    acc: jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class _Call:
    """A record with the tangents of some of its fields, cut into tiles."""

    record: TiledAttention
    tangents: Fields
    plan: TilePlan

    def load_with_tangent(self, name: str, load: Any) -> tuple[jax.Array, jax.Array | None]:
        """Returns a tile of a field and the tile of its tangent, None if it has no tangent."""
        value = getattr(self.record, name)
        return jax.jvp(load, (value,), (self.tangents[name],)) if name in self.tangents else (load(value), None)


def forward_mode(record: TiledAttention, tangents: Fields, params: ChunkedSoftmax) -> tuple[Results, Results]:
    """Returns output and residuals of a record, and the tangents of both.

    Args:
        record: The canonical arguments.
        tangents: Tangents of query, key, value, bias, relative_bias, score_mod and softmax_aux; zero where left out.
        params: Tile sizes.
    """
    state = results_without_keys(record, record.query.dtype)
    derived = params.batch_invariant or not record.normalize_output
    if derived or state["output"].size == 0 or record.key.shape[1] == 0:
        # The forward pass has the bits that `batch_invariant` promises. A numerator is relative to the maximum, which
        # then has a tangent.
        fields = {name: getattr(record, name) for name in tangents}
        return jax.jvp(lambda fields: forward(dataclasses.replace(record, **fields), params), (fields,), (tangents,))
    plan = make_plan(record, params.block_q, params.block_kv)
    call, key_tiles = _Call(record, tangents, plan), find_key_tiles(record, plan)

    def query_tile(step: jax.Array, states: tuple[Fields, Fields]) -> tuple[Fields, Fields]:
        at = plan.outer_step(step)
        rows = _load_query_tile(call, at)
        running = key_tiles.fold_key_tiles(
            at,
            lambda tile, running: _add_key_tile(call, at, tile, rows, running, False),
            lambda tile, running: _add_key_tile(call, at, tile, rows, running, True),
            _compat.as_varying(_initial(record, plan), record),
        )
        values, changes = _epilogue_with_tangents(call, at, running)
        return store_query_tile(states[0], values, plan, at), store_query_tile(states[1], changes, plan, at)

    # The lse of a call without keys is the sink, so that rows have a value before they are stored; tangents start at 0.
    start = _compat.as_varying((state, jax.tree.map(jnp.zeros_like, state)), record)
    results, changes = lax.fori_loop(jnp.int32(0), jnp.int32(plan.steps), query_tile, start)
    return output_and_residuals(results), output_and_residuals(changes)


class _Rows(NamedTuple):
    """A query tile: [b, h, g, t, d] as `load_query` gives it, its tangent or None, and row keys of dropout or None."""

    query: jax.Array
    tangent: jax.Array | None
    dropout: jax.Array | None


def _load_query_tile(call: _Call, at: OuterStep) -> _Rows:
    def load(query: jax.Array) -> jax.Array:
        return load_query(dataclasses.replace(call.record, query=query), call.plan, at)

    query, tangent = call.load_with_tangent("query", load)
    return _Rows(query, tangent, dropout_rows(call.record, call.plan, at))


def _initial(record: TiledAttention, plan: TilePlan) -> Tangents:
    softmax = initial_softmax(record, plan)
    return Tangents(softmax, jnp.zeros_like(softmax.row_sum), jnp.zeros_like(softmax.acc))


def _add_key_tile(
    call: _Call, at: OuterStep, tile: jax.Array, rows: _Rows, running: Tangents, masked: bool
) -> Tangents:
    """Returns one step of the online softmax and of its tangents."""
    record, plan = call.record, call.plan
    value, value_tangent = call.load_with_tangent("value", lambda x: load_keys(x, record, plan, at, tile))
    scores, score_tangents = _scores_with_tangents(call, at, tile, rows, masked)
    softmax, start = running.softmax, plan.keys.start(tile)
    # Held constant: output and lse do not depend on what is subtracted.
    row_max = lax.stop_gradient(jnp.maximum(softmax.row_max, jnp.max(scores, axis=-1)))
    shift = finite(row_max)
    weights, alpha = jnp.exp(scores - shift[..., None]), jnp.exp(softmax.row_max - shift)
    row_sum = alpha * softmax.row_sum + jnp.sum(weights, axis=-1)
    dropped = drop_weights(weights, rows.dropout, record, start).astype(value.dtype)
    acc = alpha[..., None] * softmax.acc + dot("bhgts,bhsv->bhgtv", dropped, value, record)
    row_sum_tangent, acc_tangent = alpha * running.row_sum, alpha[..., None] * running.acc
    if score_tangents is not None:
        changes = weights * score_tangents
        row_sum_tangent = row_sum_tangent + jnp.sum(changes, axis=-1)
        changes = drop_weights(changes, rows.dropout, record, start).astype(value.dtype)
        acc_tangent = acc_tangent + dot("bhgts,bhsv->bhgtv", changes, value, record)
    if value_tangent is not None:
        acc_tangent = acc_tangent + dot("bhgts,bhsv->bhgtv", dropped, value_tangent, record)
    return Tangents(OnlineSoftmax(row_max, None, row_sum, acc), row_sum_tangent, acc_tangent)


def _scores_with_tangents(
    call: _Call, at: OuterStep, tile: jax.Array, rows: _Rows, masked: bool
) -> tuple[jax.Array, jax.Array | None]:
    """Returns the masked scores of a tile, and their tangents; None where nothing that they depend on has any."""
    record, plan = call.record, call.plan
    key, key_tangent = call.load_with_tangent("key", lambda x: load_keys(x, record, plan, at, tile))
    pairs = {"query": (rows.query, rows.tangent), "key": (key, key_tangent)}
    pairs |= {name: (getattr(record, name), call.tangents.get(name)) for name in ("bias", "relative_bias", "score_mod")}

    def scores(moved: Fields) -> jax.Array:
        fields = {name: moved.get(name, value) for name, (value, _) in pairs.items()}
        query, key = fields.pop("query"), fields.pop("key")
        return compute_scores(dataclasses.replace(record, **fields), plan, at, tile, query, key).value

    moved = {name: value for name, (value, tangent) in pairs.items() if tangent is not None}
    if moved:
        value, tangents = jax.jvp(scores, (moved,), ({name: pairs[name][1] for name in moved},))
    else:
        value, tangents = scores(moved), None
    allowed = allowed_pairs(record, plan, at, tile) if masked else None
    if allowed is not None:
        value = jnp.where(allowed, value, -jnp.inf)
    if tangents is not None and (allowed is not None or record.bias is not None or record.score_mod is not None):
        tangents = jnp.where(value > -jnp.inf, tangents, 0)  # the weight is 0, and 0 x NaN would be NaN
    return value, tangents


def _epilogue_with_tangents(call: _Call, at: OuterStep, running: Tangents) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the epilogue of a query tile, arrays [b, h, g, t, ...], and its tangents."""
    results = epilogue(running.softmax, call.record, call.plan, at)
    lse = results["lse"]
    # 0 for rows that attend to nothing, whose lse is -inf.
    factor = jnp.where(lse > -jnp.inf, jnp.exp(running.softmax.row_max - finite(lse)), 0)
    mean = factor * running.row_sum
    sinks = head_sinks(call.record, call.plan, at)
    if sinks is not None and "softmax_aux" in call.tangents:
        weight = jnp.where(lse > -jnp.inf, jnp.exp(sinks - finite(lse)), 0)
        moved = dataclasses.replace(call.record, softmax_aux=call.tangents["softmax_aux"])
        change: Any = head_sinks(moved, call.plan, at)
        mean = mean + weight * change
    output = factor[..., None] * running.acc - results["output"] * mean[..., None]
    return results, {"output": output, "lse": mean}
