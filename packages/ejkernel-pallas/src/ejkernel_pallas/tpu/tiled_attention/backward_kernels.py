"""The backward kernels: one owns key tiles, one query tiles, one tiles of the bias; all recompute the weights."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ejkernel_pallas.tpu.tiled_attention.spec import LANES, Spec
from ejkernel_pallas.tpu.tiled_attention.tile import (
    Apart,
    Chunk,
    Refs,
    allowed,
    column,
    dropped,
    hidden,
    load_keys,
    load_queries,
    note,
    product,
    scores,
    turn_numbers,
    visit,
    visited,
    wide,
)
from ejkernel_pallas.tpu.tiled_attention.visits import FIRST, LAST


def keys_kernel(table: Any, *refs: Any, names: tuple[str, ...], spec: Spec, apart: Apart) -> None:
    """One visit of a query tile by a key tile: adds to the gradients of keys and values.

    Args:
        table: Visits by key tile, int32 [(B|1) * (Hk|1) * steps]; each is made once a head of the group.
        refs: Blocks and scratch memory.
        names: What each of them is; "dkey" and "dvalue" where they are wanted.
        spec: The kernel's constants.
        apart: Whether batch rows, and heads, have visits of their own.
    """
    named = dict(zip(names, refs, strict=True))
    entry, member = visited(table, apart), pl.program_id(3)
    first = ((entry & FIRST) != 0) & (member == 0)
    _clear(named, first)

    @pl.when(first)
    def _() -> None:
        turn_numbers(named, spec)

    visit(entry, spec, lambda at: _add_to_keys(named, at))

    @pl.when(((entry & LAST) != 0) & (member == spec.group - 1))
    def _() -> None:
        if "dkey" in named:
            named["dkey"][...] = (named["dkey_sum"][...] * spec.scale).astype(named["dkey"].dtype)
        if "dvalue" in named:
            named["dvalue"][...] = (named["dvalue_sum"][...] * spec.kept).astype(named["dvalue"].dtype)


def queries_kernel(table: Any, *refs: Any, names: tuple[str, ...], spec: Spec, apart: Apart) -> None:
    """One visit of a key tile by a query tile: adds to the gradient of the queries.

    Args:
        table: Visits by query tile, int32 [(B|1) * (H|1) * steps].
        refs: Blocks and scratch memory.
        names: What each of them is.
        spec: The kernel's constants.
        apart: Whether batch rows, and heads, have visits of their own.
    """
    named = dict(zip(names, refs, strict=True))
    entry = visited(table, apart)
    _clear(named, (entry & FIRST) != 0)

    @pl.when((entry & FIRST) != 0)
    def _() -> None:
        _turn_statistics(named)
        turn_numbers(named, spec)

    visit(entry, spec, lambda at: _add_to_queries(named, at))

    @pl.when((entry & LAST) != 0)
    def _() -> None:
        named["dquery"][...] = (named["dquery_sum"][...] * spec.scale).astype(named["dquery"].dtype)


def bias_kernel(kinds: Any, *refs: Any, names: tuple[str, ...], spec: Spec, tiles: tuple[int, ...]) -> None:
    """One tile pair, as a part of the sum that a tile of the bias's gradient is.

    Args:
        kinds: Flags of every tile pair, int32 [(B|1) * (H|1) * query tiles * key tiles].
        refs: Blocks and scratch memory.
        names: What each of them is.
        spec: The kernel's constants.
        tiles: Batch rows and heads that `kinds` tells apart, and tiles of queries and of keys.
    """
    named = dict(zip(names, refs, strict=True))
    b, h, i, j = (pl.program_id(axis) + pl.program_id(axis + 4) for axis in range(4))
    row = (b if tiles[0] > 1 else 0) * tiles[1] + (h if tiles[1] > 1 else 0)
    kind = kinds[(row * tiles[2] + i) * tiles[3] + j]
    parts = [pl.program_id(axis) for axis in range(4, 8)]
    start, end = jnp.bool_(True), jnp.bool_(True)
    for axis, part in enumerate(parts, 4):
        start, end = start & (part == 0), end & (part == pl.num_programs(axis) - 1)
    _clear(named, start)
    _turn_statistics(named)
    turn_numbers(named, spec)
    visit((i << 18) | (j << 4) | kind, spec, lambda at: _add_to_bias(named, at))

    @pl.when(end)
    def _() -> None:
        total = named["dbias_sum"][...]
        if "bias_of_queries" in named:
            total = jnp.broadcast_to(jnp.sum(total, axis=1, keepdims=True), total.shape).T[:1]
        named["dbias"][...] = total


def _clear(refs: Refs, when: jax.Array) -> None:
    @pl.when(when)
    def _() -> None:
        for name, ref in refs.items():
            if name.endswith("_sum"):
                ref[...] = jnp.zeros_like(ref)


def _add_to_keys(refs: Refs, at: Chunk) -> None:
    query, cotangent = load_queries(refs["query"], at), load_queries(refs["cotangent"], at)
    slope, kept = _note_weights(refs, query, at)
    if "dvalue" in refs:
        chosen = dropped(note(refs, "weights", at)[...], refs, at).astype(cotangent.dtype)
        refs["dvalue_sum"][at.k, :] += product(chosen, cotangent, (1, 0), at.spec)
    if "dkey" in refs:
        note(refs, "dscores", at)[...] = _score_gradient(refs, cotangent, slope, kept, at).astype(query.dtype)
        refs["dkey_sum"][at.k, :] += product(note(refs, "dscores", at)[...], query, (1, 0), at.spec)


def _add_to_queries(refs: Refs, at: Chunk) -> None:
    slope, kept = _note_weights(refs, refs["query"][at.q, :], at)
    key = load_keys(refs["key"], at)
    note(refs, "dscores", at)[...] = _score_gradient(refs, refs["cotangent"][at.q, :], slope, kept, at).astype(
        key.dtype
    )
    refs["dquery_sum"][at.q, :] += product(note(refs, "dscores", at)[...], key, (1, 0), at.spec)


def _add_to_bias(refs: Refs, at: Chunk) -> None:
    cotangent = load_queries(refs["cotangent"], at)
    slope, kept = _note_weights(refs, load_queries(refs["query"], at), at)
    dscores = _score_gradient(refs, cotangent, slope, kept, at)
    if refs["dbias_sum"].shape == (at.spec.q_block, at.spec.kv_block):
        refs["dbias_sum"][at.q, at.k] += dscores
    elif "bias_of_keys" in refs:
        refs["dbias_sum"][:, at.k] += jnp.sum(dscores, axis=0, keepdims=True)
    else:
        by_lane = [dscores[:, lane : lane + LANES] for lane in range(0, at.keys, LANES)]
        refs["dbias_sum"][at.q, :] += functools.reduce(jnp.add, by_lane)


def _note_weights(refs: Refs, query: jax.Array, at: Chunk) -> tuple[jax.Array | None, jax.Array | None]:
    """Writes the softmax weights down; the slope of the soft cap, and which pairs attend where products need it."""
    s, slope = scores(refs, load_keys(refs["key"], at), query, at)
    weights = jnp.exp2(s - _statistic(refs, "shift", at))
    note(refs, "weights", at)[...] = hidden(weights, 0.0, refs, at) if at.masked else weights
    return slope, allowed(refs, at) if at.masked and at.spec.ragged_queries else None


def _score_gradient(refs: Refs, cotangent: jax.Array, slope: Any, kept: jax.Array | None, at: Chunk) -> jax.Array:
    """Gradient of the scaled and biased scores."""
    value = load_keys(refs["value"], at)
    pair = (value, cotangent) if at.spec.by_key else (cotangent, value)
    dweights = dropped(product(*pair, (1, 1), at.spec), refs, at)
    if at.spec.threshold is not None:
        dweights = dweights * at.spec.kept
    dscores = note(refs, "weights", at)[...] * (dweights - _statistic(refs, "delta", at))
    if slope is not None:
        dscores = dscores * slope
    # Beyond the last query delta is whatever memory holds.
    return dscores if kept is None else jnp.where(kept, dscores, 0.0)


def _statistic(refs: Refs, name: str, at: Chunk) -> jax.Array:
    """Of the chunk's queries, to be broadcast against scores."""
    return refs[name][:, at.q] if at.spec.by_key else wide(refs[name + "_column"][at.q, :], at.keys)


def _turn_statistics(refs: Refs) -> None:
    """Copies the statistics of queries, which come as rows, to where scores have their queries."""
    for name in ("shift", "delta"):
        refs[name + "_column"][...] = column(refs[name][...])
