"""The forward kernel: a block of keys is read once by all queries of a tile that list it.

SMEM  work list of a tile of queries       items: a part of a block, and R queries that read it
VMEM  query tile, key tile  ◄─ double buffer ─ HBM
      for every item of the tile of keys, in three stages that overlap with those of the items before:
          q (rows of R queries, gathered)  ──►  s = q k^T, masked                           MXU
          m, l (gathered)                  ──►  m' = max(m, s), alpha, p = exp2(s - m'), l'    VPU
          acc (gathered)                   ──►  acc' = alpha acc + p v                      MXU
after the last tile of keys: output = acc / l, lse = m + log l

One query has too few heads to fill the matrix unit, and its neighbours read other blocks. Queries that read the same
block fill it. Their running softmax stays in VMEM over all tiles of keys, so that nothing is merged in HBM.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ejkernel.arithmetic import LOG2E
from ejkernel_pallas.tpu.mosaic.vectors import LANES, column_to_row, matrix_product, repeat_lanes
from ejkernel_pallas.tpu.selected_attention.kernels.tile import (
    ProductItem,
    SelectedRefs,
    attended_keys,
    for_each_item,
    for_each_row_group,
    gather_token_rows,
    scatter_token_rows,
)
from ejkernel_pallas.tpu.selected_attention.spec import SelectedSpec


def selected_fwd(refs: SelectedRefs, *, spec: SelectedSpec) -> None:
    """Processes one tile of queries and one tile of keys."""
    key_tile = pl.program_id(3)

    @pl.when(key_tile == 0)
    def _() -> None:
        refs.row_max[...] = jnp.full_like(refs.row_max, -jnp.inf)
        refs.row_sum[...] = jnp.zeros_like(refs.row_sum)
        refs.acc[...] = jnp.zeros_like(refs.acc)

    stages = (_compute_scores, _update_softmax, _accumulate)
    first, second, third = (functools.partial(stage, refs, spec) for stage in stages)
    for_each_item(refs, spec, key_tile, (first, second, third))

    @pl.when(key_tile == spec.num_key_tiles - 1)
    def _() -> None:
        for_each_row_group(spec, lambda n, tokens: _write_results(refs, spec, n, tokens))


def _compute_scores(refs: SelectedRefs, spec: SelectedSpec, item: ProductItem) -> None:
    """Computes the masked scores of an item."""
    query = gather_token_rows(refs.query, item.queries(spec)).astype(spec.operand_dtype)
    s = matrix_product(query, refs.key[item.part], (1, 1), spec.precision) * spec.log2_scale
    refs.scores[...] = jnp.where(attended_keys(item, spec), s, -jnp.inf)


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


def _write_results(refs: SelectedRefs, spec: SelectedSpec, n: jax.Array, tokens: jax.Array) -> None:
    """Writes the output and lse of 128 rows."""
    row_max = refs.row_max[tokens].reshape(LANES, LANES)
    row_sum = jnp.sum(refs.row_sum[tokens].reshape(LANES, spec.padded_keys_per_part), axis=1, keepdims=True)
    row_sum = jnp.broadcast_to(row_sum, (LANES, LANES))
    acc = refs.acc[tokens].reshape(LANES, spec.value_width)
    output = acc / repeat_lanes(jnp.where(row_sum > 0.0, row_sum, 1.0), spec.value_width)
    refs.output[tokens] = output.reshape(-1, spec.rows_per_token, spec.value_width).astype(refs.output.dtype)
    row_max, row_sum = column_to_row(jnp.where(row_sum > 0.0, row_max, 0.0)), column_to_row(row_sum)
    lse = (row_max + jnp.log2(jnp.where(row_sum > 0.0, row_sum, 1.0))) * (1.0 / LOG2E)
    refs.lse[pl.ds(n, 1), :] = jnp.where(row_sum > 0.0, lse, -jnp.inf)
