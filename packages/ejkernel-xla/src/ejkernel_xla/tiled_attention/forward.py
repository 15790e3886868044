"""Forward pass of tiled softmax attention.

For a query tile, over its key tiles (online softmax; Milakov & Gimelshein 2018, Dao et al. 2022):

    s   = masked scores of the tile
    m'  = max(m, rowmax(s))
    p   = exp(s - m')
    l   = exp(m - m') l + rowsum(p)
    o   = exp(m - m') o + dropout(p) v

and at the end `lse = log(exp(sink) + exp(m) l)` and `output = exp(m - lse) o`.

    query tile | key tiles ->  [ full | full | ... ]  scores, softmax, products
               |               [ partial | ... ]      the same with masks; empty tiles are no step of the loop
               | then          sink, normalise, write into the output in its place

Memory holds one tile of scores, whatever the lengths.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel import _compat
from ejkernel.families.tiled_attention import SoftmaxResiduals, TiledAttention
from ejkernel_xla.tiled_attention.config import ChunkedSoftmax
from ejkernel_xla.tiled_attention.kernels import fixed_tiles
from ejkernel_xla.tiled_attention.kernels.key_tiles import find_key_tiles
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
from ejkernel_xla.tiled_attention.plan import OuterStep, TilePlan, make_plan, put


class OnlineSoftmax(NamedTuple):
    """Online softmax of a query tile.

    Attributes:
        row_max: [b, h, g, t], largest score so far.
        row_argmax: [b, h, g, t] int32, the first key that has it; None for normalised outputs, which do not need it.
        row_sum: [b, h, g, t], sum of exp(score - row_max).
        acc: [b, h, g, t, v], sum of exp(score - row_max) times values.
    """

    row_max: jax.Array
    row_argmax: jax.Array | None
    row_sum: jax.Array
    acc: jax.Array


def forward(record: TiledAttention, params: ChunkedSoftmax) -> tuple[jax.Array, SoftmaxResiduals]:
    """Returns attention output and residuals of a record.

    Args:
        record: The canonical arguments.
        params: Tile sizes.

    Returns:
        Output [B, T, H, Dv] in the query's dtype, and the residuals for the backward pass.
    """
    return attend(record, params, record.query.dtype)


def attend(record: TiledAttention, params: ChunkedSoftmax, dtype: Any) -> tuple[jax.Array, SoftmaxResiduals]:
    """Runs `forward` with the output in the passed dtype, so that partial softmaxes stay wide until they are merged."""
    # Inside of `shard_map` a loop's carry has to vary over the mesh axes that its body makes it vary over.
    state = _compat.as_varying(results_without_keys(record, dtype), record)
    if state["output"].size == 0 or record.key.shape[1] == 0:
        return output_and_residuals(state)
    if params.batch_invariant:
        return _attend_in_fixed_tiles(record, params, dtype)
    plan = make_plan(record, params.block_q, params.block_kv)
    key_tiles = find_key_tiles(record, plan)

    def query_tile(step: jax.Array, state: dict[str, jax.Array]) -> dict[str, jax.Array]:
        at = plan.outer_step(step)
        query, rows = load_query(record, plan, at), dropout_rows(record, plan, at)

        def key_tile(tile: jax.Array, running: OnlineSoftmax, masked: bool) -> OnlineSoftmax:
            key, value = (load_keys(x, record, plan, at, tile) for x in (record.key, record.value))
            scores = compute_scores(record, plan, at, tile, query, key)
            if masked:
                scores = mask(scores, allowed_pairs(record, plan, at, tile))
            return _online_softmax_step(running, scores, value, rows, record, plan.keys.start(tile))

        # Two bodies: full tiles, which are most of a long causal call, compile without the comparisons of the masks.
        running = key_tiles.fold_key_tiles(
            at,
            lambda tile, running: key_tile(tile, running, False),
            lambda tile, running: key_tile(tile, running, True),
            _compat.as_varying(initial_softmax(record, plan), record),
        )
        return store_query_tile(state, epilogue(running, record, plan, at), plan, at)

    # The arrays are carried, so that XLA updates a query tile of them in place.
    return output_and_residuals(lax.fori_loop(jnp.int32(0), jnp.int32(plan.steps), query_tile, state))


def _attend_in_fixed_tiles(
    record: TiledAttention, params: ChunkedSoftmax, dtype: Any
) -> tuple[jax.Array, SoftmaxResiduals]:
    """Runs `attend` in tiles that do not depend on what else the call has."""
    tiles = fixed_tiles.cut(record, params.block_q, params.block_kv)
    record = tiles.record
    state = _compat.as_varying(results_without_keys(record, dtype), record)

    def query_tile(step: jax.Array, state: dict[str, jax.Array]) -> dict[str, jax.Array]:
        at, plan, first, end = tiles.at(step)
        query = load_query(record, plan, at)

        def key_tile(tile: jax.Array, running: OnlineSoftmax) -> OnlineSoftmax:
            key, value = (load_keys(x, record, plan, at, tile) for x in (record.key, record.value))
            scores = mask(compute_scores(record, plan, at, tile, query, key), allowed_pairs(record, plan, at, tile))
            return _online_softmax_step(running, scores, value, None, record, plan.keys.start(tile))

        running = _compat.as_varying(initial_softmax(record, plan), record)
        running = lax.fori_loop(first, end, key_tile, running)
        # Rows after the segment's end are stored too, and overwritten by the tiles of the segments they belong to.
        return store_query_tile(state, epilogue(running, record, plan, at), plan, at)

    state = lax.fori_loop(jnp.int32(0), tiles.count, query_tile, state)
    return output_and_residuals(
        {name: tiles.in_call_order(x, 1 if name == "output" else 2) for name, x in state.items()}
    )


def initial_softmax(record: TiledAttention, plan: TilePlan) -> OnlineSoftmax:
    """Returns the online softmax of a query tile before its first key tile."""
    shape, dtype = (plan.batch, plan.heads, plan.group, plan.queries.block), accumulator(record)
    row_argmax = None if record.normalize_output else jnp.zeros(shape, jnp.int32)
    acc = jnp.zeros((*shape, record.value.shape[3]), dtype)
    return OnlineSoftmax(jnp.full(shape, -jnp.inf, dtype), row_argmax, jnp.zeros(shape, dtype), acc)


def _online_softmax_step(
    running: OnlineSoftmax,
    scores: Scores,
    value: jax.Array,
    rows: jax.Array | None,
    record: TiledAttention,
    start: jax.Array,
) -> OnlineSoftmax:
    """Returns one step of the online softmax, over a key tile with values [b, h, s, v]."""
    row_max = jnp.maximum(running.row_max, jnp.max(scores.value, axis=-1))
    # A row that has attended nothing yet has -inf on both sides, and -inf - -inf would be NaN.
    shift = finite(row_max)
    weights = jnp.exp(scores.value - shift[..., None])
    alpha = jnp.exp(running.row_max - shift)
    row_sum = alpha * running.row_sum + jnp.sum(weights, axis=-1)
    # After the row sum: dropout applies to normalised weights, so the denominator has those that are dropped.
    weights = drop_weights(weights, rows, record, start).astype(value.dtype)
    acc = alpha[..., None] * running.acc + dot("bhgts,bhsv->bhgtv", weights, value, record)
    return OnlineSoftmax(row_max, _first_argmax(running, scores.value, start), row_sum, acc)


def _first_argmax(running: OnlineSoftmax, scores: jax.Array, start: jax.Array) -> jax.Array | None:
    """Returns the first key with the largest score; tiles may come in any order."""
    if running.row_argmax is None:
        return None
    tile_max, key = jnp.max(scores, axis=-1), start + jnp.argmax(scores, axis=-1).astype(jnp.int32)
    first_key = jnp.minimum(running.row_argmax, key)
    return jnp.where(
        tile_max > running.row_max, key, jnp.where(tile_max < running.row_max, running.row_argmax, first_key)
    )


def epilogue(running: OnlineSoftmax, record: TiledAttention, plan: TilePlan, at: OuterStep) -> dict[str, Any]:
    """Returns the epilogue of a query tile, arrays [b, h, g, t, ...]. The denominator gets the sink here, once."""
    row_max, row_sum = running.row_max, running.row_sum
    sink = head_sinks(record, plan, at)
    if sink is not None:
        row_max = jnp.maximum(running.row_max, sink)
        row_sum = row_sum * jnp.exp(running.row_max - finite(row_max)) + jnp.exp(sink - finite(row_max))
    attends = row_sum > 0
    # log(1) instead of log(0) under the mask: the -inf is chosen, not computed.
    lse = jnp.where(attends, jnp.log(jnp.where(attends, row_sum, 1)) + finite(row_max), -jnp.inf)
    if not record.normalize_output:
        extra = {"row_max": finite(running.row_max), "row_argmax": running.row_argmax}
        return {"output": running.acc, "lse": lse, **extra}
    # One product a row at the end, instead of a division of every weight.
    factor = jnp.exp(running.row_max - finite(row_max)) / jnp.where(attends, row_sum, 1)
    return {"output": running.acc * factor[..., None], "lse": lse}


def finite(x: jax.Array) -> jax.Array:
    """Returns x with 0 for -inf: rows without an attended key yet keep weights of exp(-inf - 0) = 0 instead of NaN."""
    return jnp.where(x == -jnp.inf, 0, x)


def results_without_keys(record: TiledAttention, output: Any) -> dict[str, jax.Array]:
    """Returns the arrays that query tiles are stored into, with the values of a call without keys."""
    (b, t, h, _), dtype = record.query.shape, accumulator(record)
    sink = jnp.full(h, -jnp.inf, dtype) if record.softmax_aux is None else record.softmax_aux.astype(dtype)
    state = {
        "output": jnp.zeros((b, t, h, record.value.shape[3]), output),
        "lse": jnp.broadcast_to(sink[:, None], (b, h, t)),
    }
    if not record.normalize_output:
        state |= {"row_max": jnp.zeros((b, h, t), dtype), "row_argmax": jnp.zeros((b, h, t), jnp.int32)}
    return state


def store_query_tile(
    state: dict[str, jax.Array], tile: dict[str, Any], plan: TilePlan, at: OuterStep
) -> dict[str, jax.Array]:
    """Returns the arrays, updated with the results of a query tile, [b, h, g, t, ...]."""
    b, heads, t = plan.batch, plan.heads * plan.group, plan.queries.block
    # A tile that was moved back writes the rows that it shares with the previous tile again, with the same numbers.
    head = at.head * plan.group
    output = tile.pop("output").transpose(0, 3, 1, 2, 4).reshape(b, t, heads, -1)
    stored = {name: put(state[name], (at.batch, head, at.query), x.reshape(b, heads, t)) for name, x in tile.items()}
    return {"output": put(state["output"], (at.batch, at.query, head, 0), output), **stored}


def output_and_residuals(state: dict[str, jax.Array]) -> tuple[jax.Array, SoftmaxResiduals]:
    """Returns the arrays that query tiles were stored into as output and residuals."""
    rest = {name: x for name, x in state.items() if name != "output"}
    return state["output"], dataclasses.replace(SoftmaxResiduals(lse=rest.pop("lse")), **rest)
