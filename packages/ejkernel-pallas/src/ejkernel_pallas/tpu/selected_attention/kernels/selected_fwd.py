"""The forward kernel: a block of keys is read once by all queries of a tile that list it.

SMEM  work list of a tile of queries       items: a part of a block, and R queries that read it
VMEM  query tile, key tile  ◄─ double buffer ─ HBM
      for every item of the tile of keys, in three stages that overlap with those of the items before:
          q (rows of R queries, gathered)  ──►  s = q k^T, masked               MXU
                                                p = exp2(s)                     VPU
          acc, l (gathered)                ──►  acc' = acc + p v, l' = l + p    MXU
after the last tile of keys: output = acc / l, lse = log l

One query has too few heads to fill the matrix unit, and its neighbours read other blocks. Queries that read the same
block fill it. Their sums stay in VMEM over all tiles of keys, so that nothing is merged in HBM.

Weights are relative to a score of 0: where a row's largest score is between -27 and 69, float32 is as exact as with
that subtracted. A tile of queries that has a sum outside 2^-40 to 2^100, or an accumulator that is not finite, is
computed again in a second round over the tiles of keys, with a running maximum:

          m, l (gathered)                  ──►  m' = max(m, s), alpha, p = exp2(s - m'), l'
          acc (gathered)                   ──►  acc' = alpha acc + p v
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ejkernel.arithmetic import LOG2E
from ejkernel_pallas.tpu.mosaic.launch import Ref
from ejkernel_pallas.tpu.mosaic.vectors import LANES, column_to_row, lane_groups, matrix_product, repeat_lanes
from ejkernel_pallas.tpu.selected_attention.kernels.tile import (
    ProductItem,
    SelectedRefs,
    add_token_rows,
    attended_keys,
    fill_token_rows,
    for_each_item,
    for_each_row_group,
    gather_token_rows,
    scatter_token_rows,
)
from ejkernel_pallas.tpu.selected_attention.spec import SelectedSpec

MAX_EXPONENT = 100.0
"""The exponent of 2 whose negative is the least of a weight."""
MIN_ROW_SUM, MAX_ROW_SUM = 2.0**-40, 2.0**100
"""Sums of weights for which float32 needs no weights that are relative to the largest score."""


def selected_fwd(refs: SelectedRefs, *, spec: SelectedSpec) -> None:
    """Processes one tile of queries and one tile of keys; every tile of keys comes a second time."""
    step, tiles = pl.program_id(3), spec.num_key_tiles

    @pl.when(step == 0)
    def _() -> None:
        refs.must_repeat[0] = 0

    def run(first_step: int, stages: tuple[Any, Any, Any]) -> None:
        @pl.when(step == first_step)
        def _() -> None:
            fill_token_rows(spec, refs.row_sum, 0.0)
            fill_token_rows(spec, refs.acc, 0.0)

        first, second, third = (functools.partial(stage, refs, spec) for stage in stages)
        for_each_item(refs, spec, step - first_step, (first, second, third))

    @pl.when(step < tiles)
    def _() -> None:
        run(0, (_compute_bounded_scores, _compute_weights, _add_weighted_values))

    @pl.when(step == tiles - 1)
    def _() -> None:
        refs.outside[...] = jnp.zeros_like(refs.outside)
        for_each_row_group(spec, lambda n, tokens: _write_results(refs, spec, n, tokens, None))
        refs.must_repeat[0] = jnp.max(refs.outside[...]).astype(jnp.int32)

    @pl.when((step >= tiles) & (refs.must_repeat[0] != 0))
    def _() -> None:
        @pl.when(step == tiles)
        def _() -> None:
            fill_token_rows(spec, refs.row_max, -jnp.inf)

        run(tiles, (_compute_scores, _update_softmax, _accumulate))

        @pl.when(step == 2 * tiles - 1)
        def _() -> None:
            for_each_row_group(spec, lambda n, tokens: _write_results(refs, spec, n, tokens, refs.row_max))


def _compute_scores(refs: SelectedRefs, spec: SelectedSpec, item: ProductItem) -> None:
    """Computes the masked scores of an item."""
    query = gather_token_rows(refs.query, item.queries(spec)).astype(spec.operand_dtype)
    s = matrix_product(query, refs.key[item.part], (1, 1), spec.precision) * spec.log2_scale
    refs.scores[...] = jnp.where(attended_keys(item, spec), s, -jnp.inf)


def _compute_bounded_scores(refs: SelectedRefs, spec: SelectedSpec, item: ProductItem) -> None:
    """Computes the masked scores of an item, none of which has a weight of 0 unless it is masked."""
    query = gather_token_rows(refs.query, item.queries(spec)).astype(spec.operand_dtype)
    s = matrix_product(query, refs.key[item.part], (1, 1), spec.precision) * spec.log2_scale
    refs.scores[...] = jnp.where(attended_keys(item, spec), jnp.maximum(s, -MAX_EXPONENT), -jnp.inf)


def _compute_weights(refs: SelectedRefs, spec: SelectedSpec, item: ProductItem) -> None:
    """Computes the weights of an item."""
    refs.weights[...] = jnp.exp2(refs.scores[...]).astype(spec.operand_dtype)


def _add_weighted_values(refs: SelectedRefs, spec: SelectedSpec, item: ProductItem) -> None:
    """Adds the weights of an item, and its weighted values, to those of its queries."""
    weights = refs.weights[...]
    weighted = matrix_product(weights, refs.value[item.part], (1, 0), spec.precision)
    add_token_rows(refs.acc, item.tokens, weighted)
    add_token_rows(refs.row_sum, item.tokens, weights.astype(jnp.float32))


def _update_softmax(refs: SelectedRefs, spec: SelectedSpec, item: ProductItem) -> None:
    """Updates the running maximum and sum of the queries of an item."""
    s, before = refs.scores[...], gather_token_rows(refs.row_max, item.tokens)
    # The rows of the filler token have no key, and become NaN, which nothing reads.
    row_max = jnp.maximum(before, jnp.max(s, axis=1, keepdims=True))
    alpha, weights = jnp.exp2(before - row_max), jnp.exp2(s - repeat_lanes(row_max, spec.padded_keys_per_part))
    row_sum = repeat_lanes(alpha, spec.padded_keys_per_part) * gather_token_rows(refs.row_sum, item.tokens) + weights
    scatter_token_rows(refs.row_max, item.tokens, row_max)
    scatter_token_rows(refs.row_sum, item.tokens, row_sum)
    refs.weights[...] = weights.astype(spec.operand_dtype)
    refs.alpha[...] = alpha


def _accumulate(refs: SelectedRefs, spec: SelectedSpec, item: ProductItem) -> None:
    """Adds the weighted values of an item to the accumulators of its queries."""
    weighted = matrix_product(refs.weights[...], refs.value[item.part], (1, 0), spec.precision)
    acc = repeat_lanes(refs.alpha[...], spec.value_width) * gather_token_rows(refs.acc, item.tokens) + weighted
    scatter_token_rows(refs.acc, item.tokens, acc)


def _write_results(refs: SelectedRefs, spec: SelectedSpec, n: jax.Array, tokens: jax.Array, maxima: Ref) -> None:
    """Writes output and lse of 128 rows, whose weights are relative to maxima; if those are None, to a score of 0."""
    row_sum = jnp.sum(refs.row_sum[tokens].reshape(LANES, spec.padded_keys_per_part), axis=1, keepdims=True)
    row_sum = jnp.broadcast_to(row_sum, (LANES, LANES))
    acc = refs.acc[tokens].reshape(LANES, spec.value_width)
    if maxima is None:
        in_range = (row_sum >= MIN_ROW_SUM) & (row_sum <= MAX_ROW_SUM) & _are_finite(acc)
        outside = jnp.where(in_range | (row_sum == 0.0), 0.0, 1.0)
        refs.outside[...] = jnp.maximum(refs.outside[...], outside)
    output = acc / repeat_lanes(jnp.where(row_sum > 0.0, row_sum, 1.0), spec.value_width)
    refs.output[tokens] = output.reshape(-1, spec.rows_per_token, spec.value_width).astype(refs.output.dtype)
    row_sum = column_to_row(row_sum)
    lse = jnp.log2(jnp.where(row_sum > 0.0, row_sum, 1.0))
    if maxima is not None:
        lse += column_to_row(maxima[tokens].reshape(LANES, LANES))
    refs.lse[pl.ds(n, 1), :] = jnp.where(row_sum > 0.0, lse * (1.0 / LOG2E), -jnp.inf)


def _are_finite(x: jax.Array) -> jax.Array:
    """Returns whether no lane group of [n, m] has an infinity or a NaN in a lane, [n, 128]."""
    results = [jnp.abs(group) < jnp.inf for group in lane_groups(x)]
    return functools.reduce(jnp.logical_and, results)
