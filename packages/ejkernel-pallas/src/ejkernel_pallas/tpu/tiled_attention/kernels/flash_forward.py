"""Forward kernel: online softmax over key tiles (Milakov & Gimelshein 2018, Dao et al. 2022).

One grid step is one tile pair; row_max, row_sum and acc stay in VMEM from a query tile's FIRST pair to its LAST.

for every tile pair of a query tile:                       VMEM                       unit
    query, key, value ◄── next blocks, double buffered     blocks                     DMA
    for every chunk:
        s = q k^T, + bias, soft cap, mask ──────────────►  scores[parity]             MXU, VPU
        m' = max(m, s); alpha = exp2(m - m') ───────────►  row_max, alpha             VPU
        p = exp2(s - m') ───────────────────────────────►  weights[parity]            EUP
        l = alpha l + sum(p); acc = alpha acc + p v ────►  row_sum, acc               VPU, MXU
after the last pair: sink; output = acc / l; lse = m + log2(l)
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.arithmetic import LOG2E
from ejkernel_pallas.tpu.mosaic.launch import Ref
from ejkernel_pallas.tpu.mosaic.vectors import LANES, column_to_row, lane_groups, matrix_product, repeat_lanes
from ejkernel_pallas.tpu.tiled_attention.kernels.chunks import (
    DistinctRowsAndHeads,
    ScoreChunk,
    current_entry,
    for_each_chunk,
)
from ejkernel_pallas.tpu.tiled_attention.kernels.refs import ForwardRefs
from ejkernel_pallas.tpu.tiled_attention.kernels.score_chunk import (
    apply_dropout,
    apply_mask,
    double_buffer,
    dropout_scratch,
    load_keys,
    scores,
    transpose_dropout_keys,
)
from ejkernel_pallas.tpu.tiled_attention.plan import FIRST_PAIR_FLAG, LAST_PAIR_FLAG
from ejkernel_pallas.tpu.tiled_attention.spec import MASKED_SCORE, TiledSpec, pad_head_dim

MAX_UNROLLED_COLUMNS = 512
"""The number of queries whose results are written without a loop; a loop keeps the code of larger tiles small."""


def forward_scratch(spec: TiledSpec, dtype: Any) -> dict[str, Any]:
    """Returns the kernel's scratch memory; `dtype` is that of values."""
    chunk = (spec.chunk_q, spec.chunk_kv)
    return {
        **{name: pltpu.VMEM((spec.block_q, LANES), jnp.float32) for name in ("row_max", "row_sum", "alpha")},
        "acc": pltpu.VMEM((spec.block_q, pad_head_dim(spec.value_dim)), jnp.float32),
        "scores": double_buffer(chunk, jnp.float32),
        "weights": double_buffer(chunk, dtype),
        **dropout_scratch(spec),
    }


def forward_kernel(refs: ForwardRefs, *, spec: TiledSpec, distinct_rows_and_heads: DistinctRowsAndHeads) -> None:
    """Processes one tile pair.

    Args:
        refs: Blocks and scratch memory; the table is int32 [(B|1) * (H|1) * steps].
        spec: The kernel's constants.
        distinct_rows_and_heads: Whether batch rows, and heads, have tile pairs of their own.
    """
    entry = current_entry(refs.table, distinct_rows_and_heads)

    @pl.when((entry & FIRST_PAIR_FLAG) != 0)
    def _() -> None:
        refs.row_max[...] = jnp.full_like(refs.row_max, -jnp.inf)
        refs.row_sum[...] = jnp.zeros_like(refs.row_sum)
        refs.acc[...] = jnp.zeros_like(refs.acc)
        transpose_dropout_keys(refs, spec)

    for_each_chunk(entry, spec, lambda at: update_softmax(refs, at))

    @pl.when((entry & LAST_PAIR_FLAG) != 0)
    def _() -> None:
        _write_query_tile(refs, spec)


def update_softmax(refs: ForwardRefs, at: ScoreChunk) -> None:
    """Updates the running softmax with a chunk: row_max, row_sum (partial sums per lane unless `sums_weights_on_mxu`)
    and acc.

    Scores, weights and alpha are kept in scratch memory, because register pressure would spill them otherwise.
    """
    spec = at.spec
    s, _ = scores(refs, load_keys(refs.key, at), refs.query[at.query_slice, :], at)
    if at.needs_mask:
        s = apply_mask(s, -jnp.inf, refs, at)
    at.of(refs.scores)[...] = s
    before = refs.row_max[at.query_slice, :]
    # The maximum is taken across lane groups on the VPU first, so that the slow XLU has one reduction across lanes
    # left.
    highest = functools.reduce(jnp.maximum, lane_groups(s))
    shift = row_max = jnp.maximum(before, jnp.max(highest, axis=1, keepdims=True))
    if spec.has_bias or (at.needs_mask and not spec.cuts_diagonal_chunks):
        # In rows without any key so far exp2(-inf - 0) = 0, not NaN. In a trapezoid every row attends the first key.
        shift = jnp.where(row_max == -jnp.inf, 0.0, row_max)
    refs.row_max[at.query_slice, :] = row_max
    refs.alpha[at.query_slice, :] = jnp.exp2(before - shift)
    weights = jnp.exp2(at.of(refs.scores)[...] - repeat_lanes(shift, at.num_keys))
    if not spec.sums_weights_on_mxu:
        _rescale_and_accumulate(refs.row_sum, functools.reduce(jnp.add, lane_groups(weights)), refs, at)
    # `row_sum` has the weights before dropout: the softmax is over all keys, and the weights that dropout keeps are
    # scaled at the end.
    at.of(refs.weights)[...] = apply_dropout(weights, refs, at).astype(refs.weights[0].dtype)
    value = load_keys(refs.value, at)
    # Columns of ones are appended to the values: the MXU sums the weights in output columns that would be idle, which
    # saves the VPU, as busy as the MXU here, an addition per score.
    if spec.sums_weights_on_mxu:
        value = jnp.concatenate([value, jnp.ones_like(value)], axis=1)
    weighted_values = matrix_product(at.of(refs.weights)[...], value, (1, 0), spec.precision)
    if spec.sums_weights_on_mxu:
        weighted_values, row_sum = jnp.split(weighted_values, 2, axis=1)
        _rescale_and_accumulate(refs.row_sum, row_sum, refs, at)
    _rescale_and_accumulate(refs.acc, weighted_values, refs, at)


def _rescale_and_accumulate(ref: Ref, addend: jax.Array, refs: ForwardRefs, at: ScoreChunk) -> None:
    """Rescales a running sum and adds to it."""
    ref[at.query_slice, :] = (
        repeat_lanes(refs.alpha[at.query_slice, :], addend.shape[1]) * ref[at.query_slice, :] + addend
    )


def _write_query_tile(refs: ForwardRefs, spec: TiledSpec) -> None:
    """Writes the output and lse of a query tile."""
    step = math.gcd(spec.block_q, MAX_UNROLLED_COLUMNS)

    def write_rows(n: Any, carry: None) -> None:
        # Processes 128 queries at a time: their statistics fill one register when transposed from sublanes to lanes.
        for first in range(0, step, LANES):
            _write_128_rows(refs, spec, pl.ds(pl.multiple_of(n * step + first, LANES), LANES))

    lax.fori_loop(0, spec.block_q // step, write_rows, None)


def _write_128_rows(refs: ForwardRefs, spec: TiledSpec, q: Any) -> None:
    """Writes the results of 128 queries. The sink is added to the denominator here, once."""
    row_max, row_sum, factor = refs.row_max[q, :], whole_row_sum(refs, spec, q), spec.dropout_scale
    if refs.sinks is not None:
        sink, before = refs.sinks[...] * LOG2E, row_max
        row_max = jnp.maximum(before, sink)
        shift = jnp.where(row_max == -jnp.inf, 0.0, row_max)
        alpha = jnp.exp2(before - shift)
        row_sum, factor = row_sum * alpha + jnp.exp2(sink - shift), factor * alpha
    output = refs.acc[q, :] * repeat_lanes(factor / jnp.where(row_sum > 0.0, row_sum, 1.0), refs.acc.shape[1])
    refs.output[q, :] = output.astype(refs.output.dtype)
    # lse is stored as a row: 128 queries take one row of lanes instead of 128 registers.
    row_max, row_sum = column_to_row(row_max), column_to_row(row_sum)
    lse = (row_max + jnp.log2(jnp.where(row_sum > 0.0, row_sum, 1.0))) * (1.0 / LOG2E)
    if spec.has_bias:
        lse = jnp.where(row_max == MASKED_SCORE, jnp.finfo(jnp.float32).min, lse)
    refs.lse[:, q] = jnp.where(row_sum > 0.0, lse, -jnp.inf)


def whole_row_sum(refs: ForwardRefs, spec: TiledSpec, q: Any) -> jax.Array:
    """Returns the row sums of some queries, the same in every lane."""
    row_sum = refs.row_sum[q, :]
    return (
        row_sum
        if spec.sums_weights_on_mxu
        else jnp.broadcast_to(jnp.sum(row_sum, axis=1, keepdims=True), row_sum.shape)
    )
