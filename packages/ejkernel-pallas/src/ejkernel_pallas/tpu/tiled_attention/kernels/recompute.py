"""Shared by the backward kernels: recomputes the weights of a chunk from lse, and computes the gradient of its
scores.

query, key, value, cotangent ◄── next blocks, double buffered              blocks
p  = exp2(q k^T - lse), masked ─────────────────────────────────────────►  weights[parity]
ds = p (cotangent v^T - delta), through the soft cap ───────────────────►  dscores[parity]
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel_pallas.tpu.mosaic.launch import Ref
from ejkernel_pallas.tpu.mosaic.vectors import LANES, matrix_product, repeat_lanes, row_to_column
from ejkernel_pallas.tpu.tiled_attention.kernels.chunks import ScoreChunk
from ejkernel_pallas.tpu.tiled_attention.kernels.refs import BackwardRefs
from ejkernel_pallas.tpu.tiled_attention.kernels.score_chunk import (
    apply_dropout,
    apply_mask,
    attending_pairs,
    double_buffer,
    dropout_scratch,
    load_keys,
    scores,
)
from ejkernel_pallas.tpu.tiled_attention.spec import TiledSpec, pad_head_dim


def backward_scratch(spec: TiledSpec, results: tuple[str, ...], dtype: Any) -> dict[str, Any]:
    """Returns the scratch memory of a backward kernel; `dtype` is that of queries.

    It contains accumulators of results, statistics of queries where these are in sublanes of scores, and two chunks of
    products.
    """
    sizes = {"dquery": spec.head_dim, "dkey": spec.head_dim, "dvalue": spec.value_dim}
    stationary = spec.block_kv if spec.accumulates_for_keys else spec.block_q
    chunk = (spec.chunk_kv, spec.chunk_q) if spec.accumulates_for_keys else (spec.chunk_q, spec.chunk_kv)
    columns = () if spec.accumulates_for_keys else ("log2_lse_column", "delta_column")
    return {
        **{f"{name}_acc": pltpu.VMEM((stationary, pad_head_dim(sizes[name])), jnp.float32) for name in results},
        **{name: pltpu.VMEM((spec.block_q, LANES), jnp.float32) for name in columns},
        "weights": double_buffer(chunk, jnp.float32),
        "dscores": double_buffer(chunk, dtype),
        **dropout_scratch(spec),
    }


def zero_accumulators(refs: BackwardRefs, condition: jax.Array) -> None:
    @pl.when(condition)
    def _() -> None:
        for ref in refs.accumulators:
            ref[...] = jnp.zeros_like(ref)


def recompute_weights(
    refs: BackwardRefs, query: jax.Array, at: ScoreChunk
) -> tuple[jax.Array | None, jax.Array | None]:
    """Writes the weights to scratch memory; returns the soft cap's slope, and the mask where products need it."""
    s, slope = scores(refs, load_keys(refs.key, at), query, at)
    # Computed from lse, so the weights are normalised without a maximum and a sum of their own.
    weights = jnp.exp2(s - _query_statistic(refs.log2_lse, refs.log2_lse_column, at))
    # Masked after the exponential, which may overflow for a masked score: the result is replaced, not multiplied by 0.
    at.of(refs.weights)[...] = apply_mask(weights, 0.0, refs, at) if at.needs_mask else weights
    # Products of rows of different segments may exceed float32's range, and 0 x inf is NaN; as may a derivative of
    # `score_mod` beyond the last key.
    unbounded = at.spec.has_partial_query_tile or refs.q_ids is not None or at.spec.score_mod is not None
    needs_mask = at.needs_mask and unbounded
    return slope, attending_pairs(refs, at) if needs_mask else None


def score_gradient(
    refs: BackwardRefs, cotangent: jax.Array, soft_cap_slope: Any, mask: jax.Array | None, at: ScoreChunk
) -> jax.Array:
    """Returns the gradient of the scaled and biased scores."""
    value = load_keys(refs.value, at)
    pair = (value, cotangent) if at.spec.accumulates_for_keys else (cotangent, value)
    dweights = apply_dropout(matrix_product(*pair, (1, 1), at.spec.precision), refs, at)
    if at.spec.dropout_threshold is not None:
        dweights = dweights * at.spec.dropout_scale
    dscores = at.of(refs.weights)[...] * (dweights - _query_statistic(refs.delta, refs.delta_column, at))
    if soft_cap_slope is not None:
        dscores = dscores * soft_cap_slope
    # Beyond the last query, delta is uninitialised memory, which may be NaN.
    return dscores if mask is None else jnp.where(mask, dscores, 0.0)


def _query_statistic(row: Ref, column: Ref, at: ScoreChunk) -> jax.Array:
    """Returns a statistic of the chunk's queries, to be broadcast against scores."""
    return (
        row[:, at.query_slice] if at.spec.accumulates_for_keys else repeat_lanes(column[at.query_slice, :], at.num_keys)
    )


def transpose_statistics(refs: BackwardRefs) -> None:
    """Copies the statistics of queries from lanes to sublanes, the axis of queries in scores."""
    refs.log2_lse_column[...] = row_to_column(refs.log2_lse[...])
    refs.delta_column[...] = row_to_column(refs.delta[...])
