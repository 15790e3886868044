"""The backward kernels: one accumulates for key tiles, one for query tiles, one for the bias; all recompute weights.

    for every tile pair of the accumulated tile:
        query, key, value, cotangent ◄── next blocks, double buffered          blocks
        for every chunk:
            p  = exp2(q k^T - lse), masked ─────────────────────────────────►  weights[parity]
            ds = p (cotangent v^T - delta), through the soft cap ───────────►  dscores[parity]
            keys kernel:     dvalue_acc += p^T cotangent;  dkey_acc += ds^T query
            queries kernel:  dquery_acc += ds key
            bias kernel:     dbias_acc  += ds
    after the last pair: accumulator, scaled ──► result

In the keys kernel scores are [keys, queries], so p^T and ds^T are what the products read and nothing is transposed.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ejkernel_pallas.tpu.mosaic.launch import Ref
from ejkernel_pallas.tpu.mosaic.vectors import column, lane_groups, product, widen
from ejkernel_pallas.tpu.tiled_attention.pair_table import FIRST, LAST
from ejkernel_pallas.tpu.tiled_attention.refs import BackwardRefs
from ejkernel_pallas.tpu.tiled_attention.spec import TiledSpec
from ejkernel_pallas.tpu.tiled_attention.tile import (
    Distinct,
    ScoreChunk,
    allowed,
    apply_mask,
    current_entry,
    drop,
    for_each_chunk,
    load_keys,
    load_queries,
    scores,
    transpose_dropout_keys,
)


def keys_kernel(refs: BackwardRefs, *, spec: TiledSpec, distinct: Distinct) -> None:
    """One tile pair of a key tile: adds to the gradients of keys and values.

    Args:
        refs: Blocks and scratch memory, of `dkey` and `dvalue` those that are wanted; the table lists tile pairs by key
            tile, int32 [(B|1) * (Hk|1) * steps], each for every head of the group.
        spec: The kernel's constants.
        distinct: Whether batch rows, and heads, have tile pairs of their own.
    """
    entry, member = current_entry(refs.table, distinct), pl.program_id(3)
    # The heads of a group are the innermost grid axis: all of them add to the accumulators before a key tile is left.
    first = ((entry & FIRST) != 0) & (member == 0)
    _zero_accumulators(refs, first)

    @pl.when(first)
    def _() -> None:
        transpose_dropout_keys(refs, spec)

    for_each_chunk(entry, spec, lambda at: _add_to_keys(refs, at))

    @pl.when(((entry & LAST) != 0) & (member == spec.group_size - 1))
    def _() -> None:
        if refs.dkey is not None:
            # The scale once at the end, in float32, instead of on every score's gradient.
            refs.dkey[...] = (refs.dkey_acc[...] * spec.scale).astype(refs.dkey.dtype)
        if refs.dvalue is not None:
            refs.dvalue[...] = (refs.dvalue_acc[...] * spec.dropout_scale).astype(refs.dvalue.dtype)


def queries_kernel(refs: BackwardRefs, *, spec: TiledSpec, distinct: Distinct) -> None:
    """One tile pair of a query tile: adds to the gradient of the queries.

    Args:
        refs: Blocks and scratch memory; the table lists tile pairs by query tile, int32 [(B|1) * (H|1) * steps].
        spec: The kernel's constants.
        distinct: Whether batch rows, and heads, have tile pairs of their own.
    """
    entry = current_entry(refs.table, distinct)
    _zero_accumulators(refs, (entry & FIRST) != 0)

    @pl.when((entry & FIRST) != 0)
    def _() -> None:
        # Once a query tile: all of its chunks read the columns.
        _transpose_statistics(refs)
        transpose_dropout_keys(refs, spec)

    for_each_chunk(entry, spec, lambda at: _add_to_queries(refs, at))

    @pl.when((entry & LAST) != 0)
    def _() -> None:
        refs.dquery[...] = (refs.dquery_acc[...] * spec.scale).astype(refs.dquery.dtype)


def bias_kernel(refs: BackwardRefs, *, spec: TiledSpec, tiles: tuple[int, ...]) -> None:
    """One tile pair, as a part of the sum that a tile of the bias's gradient is.

    Args:
        refs: Blocks and scratch memory; the table has the flags of every tile pair, int32
            [(B|1) * (H|1) * query tiles * key tiles].
        spec: The kernel's constants.
        tiles: Batch rows and heads that the table distinguishes, and tiles of queries and of keys.
    """
    # Of every axis of the grid one half is 0: an axis of the bias is walked outside, one that it is broadcast along
    # inside, where parts are added up.
    b, h, i, j = (pl.program_id(axis) + pl.program_id(axis + 4) for axis in range(4))
    row = (b if tiles[0] > 1 else 0) * tiles[1] + (h if tiles[1] > 1 else 0)
    kind = refs.table[(row * tiles[2] + i) * tiles[3] + j]
    parts = [pl.program_id(axis) for axis in range(4, 8)]
    # The first and the last part of the sum: those where no inner axis has begun, and where all have ended.
    start, end = jnp.bool_(True), jnp.bool_(True)
    for axis, part in enumerate(parts, 4):
        start, end = start & (part == 0), end & (part == pl.num_programs(axis) - 1)
    _zero_accumulators(refs, start)
    _transpose_statistics(refs)
    transpose_dropout_keys(refs, spec)
    for_each_chunk((i << 18) | (j << 4) | kind, spec, lambda at: _add_to_bias(refs, at))

    @pl.when(end)
    def _() -> None:
        total = refs.dbias_acc[...]
        if refs.bias_of_queries is not None:
            # Partial sums lie by lane until here, so the slow reduction across lanes runs once a tile.
            total = jnp.broadcast_to(jnp.sum(total, axis=1, keepdims=True), total.shape).T[:1]
        refs.dbias[...] = total


def _zero_accumulators(refs: BackwardRefs, when: jax.Array) -> None:
    @pl.when(when)
    def _() -> None:
        for ref in refs.accumulators:
            ref[...] = jnp.zeros_like(ref)


def _add_to_keys(refs: BackwardRefs, at: ScoreChunk) -> None:
    query, cotangent = load_queries(refs.query, at), load_queries(refs.cotangent, at)
    slope, kept = _recompute_weights(refs, query, at)
    if refs.dvalue is not None:
        # dv sees dropped weights as 0; the gradient of scores needs them as they were, so both come out of scratch.
        chosen = drop(at.of(refs.weights)[...], refs, at).astype(cotangent.dtype)
        refs.dvalue_acc[at.k, :] += product(chosen, cotangent, (1, 0), at.spec.precision)
    if refs.dkey is not None:
        at.of(refs.dscores)[...] = _score_gradient(refs, cotangent, slope, kept, at).astype(query.dtype)
        refs.dkey_acc[at.k, :] += product(at.of(refs.dscores)[...], query, (1, 0), at.spec.precision)


def _add_to_queries(refs: BackwardRefs, at: ScoreChunk) -> None:
    slope, kept = _recompute_weights(refs, refs.query[at.q, :], at)
    key = load_keys(refs.key, at)
    at.of(refs.dscores)[...] = _score_gradient(refs, refs.cotangent[at.q, :], slope, kept, at).astype(key.dtype)
    refs.dquery_acc[at.q, :] += product(at.of(refs.dscores)[...], key, (1, 0), at.spec.precision)


def _add_to_bias(refs: BackwardRefs, at: ScoreChunk) -> None:
    cotangent = load_queries(refs.cotangent, at)
    slope, kept = _recompute_weights(refs, load_queries(refs.query, at), at)
    dscores = _score_gradient(refs, cotangent, slope, kept, at)
    # A bias of rows or columns alone is summed up here, and takes no tile of pairs in VMEM.
    if refs.dbias_acc.shape == (at.spec.block_q, at.spec.block_kv):
        refs.dbias_acc[at.q, at.k] += dscores
    elif refs.bias_of_keys is not None:
        refs.dbias_acc[:, at.k] += jnp.sum(dscores, axis=0, keepdims=True)
    else:
        # Across lane groups on the VPU; across lanes once at the end.
        by_lane = lane_groups(dscores)
        refs.dbias_acc[at.q, :] += functools.reduce(jnp.add, by_lane)


def _recompute_weights(
    refs: BackwardRefs, query: jax.Array, at: ScoreChunk
) -> tuple[jax.Array | None, jax.Array | None]:
    """Writes the weights to scratch; returns the soft cap's slope, and the mask where products need it."""
    s, slope = scores(refs, load_keys(refs.key, at), query, at)
    # From lse, so that they are normalised: no maximum and no sum of their own.
    weights = jnp.exp2(s - _statistic(refs.shift, refs.shift_column, at))
    # Masked after the exponential, which may overflow for a masked score: it is replaced, not multiplied.
    at.of(refs.weights)[...] = apply_mask(weights, 0.0, refs, at) if at.masked else weights
    # Products of other segments' rows may be larger than float32 holds, and 0 x inf is NaN.
    replaced = at.masked and (at.spec.ragged_queries or refs.q_ids is not None)
    return slope, allowed(refs, at) if replaced else None


def _score_gradient(
    refs: BackwardRefs, cotangent: jax.Array, slope: Any, kept: jax.Array | None, at: ScoreChunk
) -> jax.Array:
    """Gradient of the scaled and biased scores."""
    value = load_keys(refs.value, at)
    pair = (value, cotangent) if at.spec.by_key else (cotangent, value)
    dweights = drop(product(*pair, (1, 1), at.spec.precision), refs, at)
    if at.spec.threshold is not None:
        dweights = dweights * at.spec.dropout_scale
    dscores = at.of(refs.weights)[...] * (dweights - _statistic(refs.delta, refs.delta_column, at))
    if slope is not None:
        dscores = dscores * slope
    # Past the last query delta is whatever memory holds, NaN included.
    return dscores if kept is None else jnp.where(kept, dscores, 0.0)


def _statistic(row: Ref, column: Ref, at: ScoreChunk) -> jax.Array:
    """A statistic of the chunk's queries, to be broadcast against scores."""
    return row[:, at.q] if at.spec.by_key else widen(column[at.q, :], at.keys)


def _transpose_statistics(refs: BackwardRefs) -> None:
    """Copies the statistics of queries from lanes to sublanes, where scores have their queries."""
    refs.shift_column[...] = column(refs.shift[...])
    refs.delta_column[...] = column(refs.delta[...])
