"""The forward kernel: dense attention of a tile of queries to the union of their lists.

HBM   keys ── double buffer ──►  tile of keys
VMEM  queries of a tile, their lists     once
MXU   counts of a query = high digits x low digits of its list        [S / 128, 128], at the first tile of keys
VPU   terms of a key = log2 counts, or a mask, in its padding lanes   per tile of keys
MXU   union <- one-hot rows x 256 keys                                the keys that some query lists, moved to the front
MXU   scores = q k                       acc += weights v             per 1024 keys of the union
VPU   weights = 2^(scores - m), m, l
after the last tile: output = acc / l, lse
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ejkernel.arithmetic import LOG2E
from ejkernel_pallas.tpu.mosaic.loops import for_each_index, fori_loop
from ejkernel_pallas.tpu.mosaic.vectors import LANES, lane_groups, matrix_product, repeat_lanes
from ejkernel_pallas.tpu.token_sparse_attention_union.config import GROUP
from ejkernel_pallas.tpu.token_sparse_attention_union.kernels.count_listed import count_groups, count_listed
from ejkernel_pallas.tpu.token_sparse_attention_union.kernels.gather_union import (
    append_groups,
    mask_rest,
    move_left,
    store_slots,
    store_tails,
)
from ejkernel_pallas.tpu.token_sparse_attention_union.kernels.refs import UnionRefs
from ejkernel_pallas.tpu.token_sparse_attention_union.spec import UnionSpec

MIN_ROW_MAX = -1e30
"""The running maximum of a row without a listed key so far."""


def attend_union(refs: UnionRefs, *, spec: UnionSpec) -> None:
    """Processes a tile of queries and a tile of keys."""
    step = pl.program_id(2)
    tile = pl.program_id(0) * spec.num_query_tiles + pl.program_id(1)
    first, end = refs.first_key_tile[tile], refs.end_key_tile[tile]

    @pl.when(step == 0)
    def _() -> None:
        refs.row_max[...] = jnp.full_like(refs.row_max, MIN_ROW_MAX)
        refs.row_sum[...] = jnp.zeros_like(refs.row_sum)
        refs.acc[...] = jnp.zeros_like(refs.acc)
        refs.not_finite_counts[...] = jnp.zeros_like(refs.not_finite_counts)
        row, column = (lax.broadcasted_iota(jnp.int32, (GROUP, GROUP), axis) for axis in (0, 1))
        refs.is_before[...] = jnp.where(row < column, 1.0, 0.0).astype(jnp.bfloat16)
        refs.union_end[0] = 0
        count_listed(refs, spec, first, end)

    @pl.when((step >= first) & (step < end))
    def _() -> None:
        first_group = step * (spec.block_kv // LANES)
        count_groups(refs, spec, first_group)
        store_tails(refs, spec, first_group)
        store_slots(refs, spec, first_group)
        for_each_index(
            spec.block_kv // (GROUP * spec.groups_per_append),
            lambda n: _process_groups(refs, spec, n * spec.groups_per_append),
        )

    @pl.when(step == spec.num_key_tiles - 1)
    def _() -> None:
        mask_rest(refs, spec)
        _attend(refs, spec)
        for_each_index(spec.block_q, lambda n: _store(refs, spec, n))


def _process_groups(refs: UnionRefs, spec: UnionSpec, first: Any) -> None:
    """Appends the keys of some groups, and attends to as many keys as one product takes while there are so many."""
    append_groups(refs, spec, first)

    def attend_and_move(n: Any, carry: None) -> None:
        _attend(refs, spec)
        move_left(refs, spec)

    fori_loop(0, lax.div(refs.union_end[0], spec.product_keys), attend_and_move, None)


def _attend(refs: UnionRefs, spec: UnionSpec) -> None:
    """Adds the first keys of the union to the sums of all rows."""

    def attend_rows(n: Any) -> None:
        rows = pl.ds(pl.multiple_of(n * spec.product_rows, spec.product_rows), spec.product_rows)
        key = refs.union[: spec.product_keys, :]
        scores = matrix_product(refs.query[rows, :], key, (1, 1), spec.precision) * spec.log2_scale
        before = refs.row_max[rows, :]
        row_max = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
        alpha, weights = jnp.exp2(before - row_max), jnp.exp2(scores - repeat_lanes(row_max, spec.product_keys))
        refs.row_max[rows, :] = row_max
        refs.row_sum[rows, :] = refs.row_sum[rows, :] * alpha + sum(lane_groups(weights))
        value = refs.union[: spec.product_keys, : spec.value_width]
        weighted = matrix_product(weights.astype(value.dtype), value, (1, 0), spec.precision)
        refs.acc[rows, :] = refs.acc[rows, :] * repeat_lanes(alpha, spec.value_width) + weighted

    for_each_index(spec.tile_rows // spec.product_rows, attend_rows)


def _store(refs: UnionRefs, spec: UnionSpec, query: Any) -> None:
    """Stores the outputs and log-sum-exps of the rows of a query."""
    rows = pl.ds(pl.multiple_of(query * spec.rows_per_query, spec.rows_per_query), spec.rows_per_query)
    not_finite = jnp.max(refs.not_finite_counts[pl.ds(query, 1), :], axis=1, keepdims=True)
    row_sum = jnp.sum(refs.row_sum[rows, :], axis=1, keepdims=True) + jnp.where(not_finite > 0, jnp.nan, 0.0)
    row_sum = jnp.broadcast_to(row_sum, (spec.rows_per_query, LANES))
    attends = row_sum != 0  # also where it is NaN
    denominator = jnp.where(attends, row_sum, 1.0)
    output = refs.acc[rows, :] / repeat_lanes(denominator, spec.value_width)
    refs.output[rows, :] = output.astype(refs.output.dtype)
    lse = (jnp.log2(denominator) + refs.row_max[rows, :]) * (1.0 / LOG2E)
    refs.lse[rows, :] = jnp.where(attends, lse, -jnp.inf)
