"""Forward pass of tiled softmax attention.

For a query tile, over its key tiles (online softmax; Milakov & Gimelshein 2018, Dao et al. 2022):

    s   = masked scores of the tile
    m'  = max(m, rowmax(s))
    p   = exp(s - m')
    l   = exp(m - m') l + rowsum(p)
    o   = exp(m - m') o + dropout(p) v

and at the end `lse = log(exp(sink) + exp(m) l)` and `output = exp(m - lse) o`.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel import _compat
from ejkernel.families.tiled_attention import SoftmaxResiduals, TiledAttention
from ejkernel_xla.tiled_attention.blocks import Cursor, Plan, make_plan, put
from ejkernel_xla.tiled_attention.scores import (
    Scores,
    accumulator,
    allow,
    dot,
    drop,
    dropout_rows,
    load_keys,
    load_query,
    mask,
    score,
)
from ejkernel_xla.tiled_attention.tiles import ChunkedSoftmax
from ejkernel_xla.tiled_attention.visits import find_visits


class Running(NamedTuple):
    """Online softmax of a query tile.

    Attributes:
        peak: [b, h, g, t], largest score so far.
        argpeak: [b, h, g, t] int32, the first key that has it; None if nobody asks.
        total: [b, h, g, t], sum of exp(score - peak).
        output: [b, h, g, t, v], sum of exp(score - peak) times values.
    """

    peak: jax.Array
    argpeak: jax.Array | None
    total: jax.Array
    output: jax.Array


def forward(record: TiledAttention, params: ChunkedSoftmax) -> tuple[jax.Array, SoftmaxResiduals]:
    """Attention output and residuals of a record.

    Args:
        record: The canonical arguments.
        params: Tile sizes.

    Returns:
        Output [B, T, H, Dv] in the query's dtype, and the residuals for the backward pass.
    """
    return attend(record, params, record.query.dtype)


def attend(record: TiledAttention, params: ChunkedSoftmax, dtype: Any) -> tuple[jax.Array, SoftmaxResiduals]:
    """`forward` with the output in a dtype of choice: parts of an attention that are yet to be merged stay wide."""
    state = _compat.as_varying(_initial(record, dtype), record)
    if state["output"].size == 0 or record.key.shape[1] == 0:
        return _pack(state)
    plan = make_plan(record, params.block_q, params.block_kv)
    visits = find_visits(record, plan)

    def query_tile(step: jax.Array, state: dict[str, jax.Array]) -> dict[str, jax.Array]:
        at = plan.cursor(step)
        query, rows = load_query(record, plan, at), dropout_rows(record, plan, at)

        def key_tile(tile: jax.Array, running: Running, masked: bool) -> Running:
            key, value = (load_keys(x, record, plan, at, tile) for x in (record.key, record.value))
            scores = score(record, plan, at, tile, query, key)
            if masked:
                scores = mask(scores, allow(record, plan, at, tile))
            return _update(running, scores, value, rows, record, plan.keys.start(tile))

        running = visits.fold(
            at,
            lambda tile, running: key_tile(tile, running, False),
            lambda tile, running: key_tile(tile, running, True),
            _compat.as_varying(_start(record, plan), record),
        )
        return _store(state, _finish(running, record, plan, at), plan, at)

    return _pack(lax.fori_loop(jnp.int32(0), jnp.int32(plan.steps), query_tile, state))


def _start(record: TiledAttention, plan: Plan) -> Running:
    shape, dtype = (plan.batch, plan.heads, plan.group, plan.queries.block), accumulator(record)
    argpeak = None if record.normalize_output else jnp.zeros(shape, jnp.int32)
    output = jnp.zeros((*shape, record.value.shape[3]), dtype)
    return Running(jnp.full(shape, -jnp.inf, dtype), argpeak, jnp.zeros(shape, dtype), output)


def _update(
    running: Running, scores: Scores, value: jax.Array, rows: jax.Array | None, record: TiledAttention, start: jax.Array
) -> Running:
    """Takes one key tile, values [b, h, s, v], into the running softmax."""
    peak = jnp.maximum(running.peak, jnp.max(scores.value, axis=-1))
    shift = finite(peak)
    weights = jnp.exp(scores.value - shift[..., None])
    fade = jnp.exp(running.peak - shift)
    total = fade * running.total + jnp.sum(weights, axis=-1)
    weights = drop(weights, rows, record, start).astype(value.dtype)
    output = fade[..., None] * running.output + dot("bhgts,bhsv->bhgtv", weights, value, record)
    return Running(peak, _first_peak(running, scores.value, start), total, output)


def _first_peak(running: Running, scores: jax.Array, start: jax.Array) -> jax.Array | None:
    """The first key with the largest score; tiles may come in any order."""
    if running.argpeak is None:
        return None
    here, key = jnp.max(scores, axis=-1), start + jnp.argmax(scores, axis=-1).astype(jnp.int32)
    tied = jnp.minimum(running.argpeak, key)
    return jnp.where(here > running.peak, key, jnp.where(here < running.peak, running.argpeak, tied))


def _finish(running: Running, record: TiledAttention, plan: Plan, at: Cursor) -> dict[str, Any]:
    """What is stored of a query tile, each [b, h, g, t, ...]. The sink joins here, once."""
    peak, total = running.peak, running.total
    if record.softmax_aux is not None:
        sink = lax.dynamic_slice(record.softmax_aux, (at.head * plan.group,), (plan.heads * plan.group,))
        sink = sink.astype(peak.dtype).reshape(plan.heads, plan.group, 1)
        peak = jnp.maximum(running.peak, sink)
        total = total * jnp.exp(running.peak - finite(peak)) + jnp.exp(sink - finite(peak))
    some = total > 0
    lse = jnp.where(some, jnp.log(jnp.where(some, total, 1)) + finite(peak), -jnp.inf)
    if not record.normalize_output:
        extra = {"row_max": finite(running.peak), "row_argmax": running.argpeak}
        return {"output": running.output, "lse": lse, **extra}
    factor = jnp.exp(running.peak - finite(peak)) / jnp.where(some, total, 1)
    return {"output": running.output * factor[..., None], "lse": lse}


def finite(x: jax.Array) -> jax.Array:
    """x with 0 for -inf: rows that have seen nothing yet keep weights of exp(-inf - 0) = 0 instead of NaN."""
    return jnp.where(x == -jnp.inf, 0, x)


def _initial(record: TiledAttention, output: Any) -> dict[str, jax.Array]:
    """The arrays that query tiles are stored into; already right where there are no keys."""
    (b, t, h, _), dtype = record.query.shape, accumulator(record)
    sink = jnp.full(h, -jnp.inf, dtype) if record.softmax_aux is None else record.softmax_aux.astype(dtype)
    state = {
        "output": jnp.zeros((b, t, h, record.value.shape[3]), output),
        "lse": jnp.broadcast_to(sink[:, None], (b, h, t)),
    }
    if not record.normalize_output:
        state |= {"row_max": jnp.zeros((b, h, t), dtype), "row_argmax": jnp.zeros((b, h, t), jnp.int32)}
    return state


def _store(state: dict[str, jax.Array], tile: dict[str, Any], plan: Plan, at: Cursor) -> dict[str, jax.Array]:
    b, heads, t = plan.batch, plan.heads * plan.group, plan.queries.block
    head = at.head * plan.group
    output = tile.pop("output").transpose(0, 3, 1, 2, 4).reshape(b, t, heads, -1)
    stored = {name: put(state[name], (at.batch, head, at.query), x.reshape(b, heads, t)) for name, x in tile.items()}
    return {"output": put(state["output"], (at.batch, at.query, head, 0), output), **stored}


def _pack(state: dict[str, jax.Array]) -> tuple[jax.Array, SoftmaxResiduals]:
    rest = {name: x for name, x in state.items() if name != "output"}
    return state["output"], dataclasses.replace(SoftmaxResiduals(lse=rest.pop("lse")), **rest)
