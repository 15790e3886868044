"""The forward kernel: attention to whole tiles of keys, each counted as often as a query lists it.

HBM   keys, values ── double buffer ──►  tile of keys
VMEM  queries of a tile, their lists     once
MXU   counts of a query = high digits x low digits of its list        [S / 128, 128], at the first tile of keys
VPU   list terms = log2 counts                                        -inf for keys that it does not list
MXU   scores = q k                       acc += weights v             per tile of keys and KV head
VPU   weights = 2^(scores + list terms - m), m, l
after the last tile: output = acc / l, lse

A key's index has two digits: the high one is the index divided by 128, the low one the remainder. A product of a list's
one-hot vectors of both, summed over the list, counts how often each pair of digits is there. It replaces a copy per
listed key, whose start alone takes the scalar unit 20 cycles.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ejkernel.arithmetic import LOG2E
from ejkernel_pallas.tpu.mosaic.launch import Ref
from ejkernel_pallas.tpu.mosaic.loops import for_each_index, fori_loop
from ejkernel_pallas.tpu.mosaic.vectors import LANES, lane_groups, matrix_product, repeat_lanes
from ejkernel_pallas.tpu.token_sparse_attention.spec import TokenSparseSpec

MIN_ROW_MAX = -1e30
"""The running maximum of a row without a listed key so far."""
LANE_BITS = LANES.bit_length() - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenSparseRefs:
    """Refs of the kernel; `value` is None where values are in keys.

    Attributes:
        first_key_tile: The first tile of keys of each tile of queries, in scalar memory.
        end_key_tile: The tile after the last one.
        query: [Hk, rows, D].
        indices: int32 [lists, block_q, K].
        key: [block_kv, Hk D].
        value: [block_kv, Hk Dv].
        key_terms: float32 [Hk, block_kv / 128, 128], NaN for keys that are not finite, else 0.
        output: Result, [Hk, rows, Dv].
        lse: Result, float32 [Hk, rows, 128].
        list_terms: Scratch, float32 [lists, block_q, keys / 128, 128]: log2 of how often a query lists a key.
        row_max: Scratch, float32 [Hk, rows, 128], the same in every lane.
        row_sum: Scratch, float32 [Hk, rows, 128], a sum per lane.
        acc: Scratch, float32 [Hk, rows, Dv].
    """

    first_key_tile: Ref
    end_key_tile: Ref
    query: Ref
    indices: Ref
    key: Ref
    value: Ref = None
    key_terms: Ref
    output: Ref
    lse: Ref
    list_terms: Ref
    row_max: Ref
    row_sum: Ref
    acc: Ref


def attend_counted(refs: TokenSparseRefs, *, spec: TokenSparseSpec) -> None:
    """Processes a tile of queries and a tile of keys."""
    step = pl.program_id(2)
    tile = pl.program_id(0) * spec.num_query_tiles + pl.program_id(1)
    first, end = refs.first_key_tile[tile], refs.end_key_tile[tile]

    @pl.when(step == 0)
    def _() -> None:
        refs.row_max[...] = jnp.full_like(refs.row_max, MIN_ROW_MAX)
        refs.row_sum[...] = jnp.zeros_like(refs.row_sum)
        refs.acc[...] = jnp.zeros_like(refs.acc)
        for_each_index(spec.num_lists * spec.block_q, lambda n: _count_listed(refs, spec, n, first, end))

    @pl.when((step >= first) & (step < end))
    def _() -> None:
        for_each_index(spec.kv_heads, lambda head: _attend(refs, spec, head, step))

    @pl.when(step == spec.num_key_tiles - 1)
    def _() -> None:
        for_each_index(spec.kv_heads, lambda head: _store(refs, spec, head))


def _count_listed(refs: TokenSparseRefs, spec: TokenSparseSpec, n: Any, first: Any, end: Any) -> None:
    """Stores the logarithms of how often a list has each key, for the tiles from `first` to `end`."""
    index, query = lax.div(n, spec.block_q), lax.rem(n, spec.block_q)
    listed = refs.indices[index, pl.ds(query, 1), :]
    high, low = lax.shift_right_arithmetic(listed, jnp.int32(LANE_BITS)), listed & (LANES - 1)
    groups = spec.block_kv // LANES
    digit = lax.broadcasted_iota(jnp.int32, (LANES, listed.shape[1]), 0)
    is_low = jnp.where(digit == low, 1.0, 0.0).astype(jnp.bfloat16)
    group = lax.broadcasted_iota(jnp.int32, (groups, listed.shape[1]), 0)

    def count_tile(tile: Any, carry: None) -> None:
        is_high = jnp.where(group + tile * groups == high, 1.0, 0.0).astype(jnp.bfloat16)
        counts = matrix_product(is_high, is_low, (1, 1), lax.Precision.DEFAULT)
        terms = jnp.where(counts > 0, jnp.log2(jnp.maximum(counts, 1.0)), -jnp.inf)
        refs.list_terms[index, query, pl.ds(tile * groups, groups), :] = terms

    fori_loop(first, end, count_tile, None)


def _attend(refs: TokenSparseRefs, spec: TokenSparseSpec, head: Any, tile: Any) -> None:
    """Adds the listed keys of a tile to the sums of the rows of a KV head."""

    def columns(width: int) -> Any:
        return pl.ds(pl.multiple_of(head * width, width), width)

    key = refs.key[:, columns(spec.key_width)]
    value = key[:, : spec.value_width] if spec.values_in_keys else refs.value[:, columns(spec.value_width)]
    num_queries = spec.queries_per_product

    def attend_queries(n: Any) -> None:
        rows = pl.ds(pl.multiple_of(n * spec.product_rows, spec.product_rows), spec.product_rows)
        scores = matrix_product(refs.query[head, rows, :], key, (1, 1), spec.precision) * spec.log2_scale
        scores = scores + _terms(refs, spec, head, n * num_queries, tile)
        before = refs.row_max[head, rows, :]
        row_max = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
        alpha, weights = jnp.exp2(before - row_max), jnp.exp2(scores - repeat_lanes(row_max, spec.block_kv))
        refs.row_max[head, rows, :] = row_max
        refs.row_sum[head, rows, :] = refs.row_sum[head, rows, :] * alpha + sum(lane_groups(weights))
        weighted = matrix_product(weights.astype(value.dtype), value, (1, 0), spec.precision)
        refs.acc[head, rows, :] = refs.acc[head, rows, :] * repeat_lanes(alpha, spec.value_width) + weighted

    for_each_index(spec.tile_rows // spec.product_rows, attend_queries)


def _terms(refs: TokenSparseRefs, spec: TokenSparseSpec, head: Any, first_query: Any, tile: Any) -> jax.Array:
    """Returns what is added to the scores of a tile, [rows, keys]: the same for all heads of a query."""
    groups = spec.block_kv // LANES
    key_terms, results = refs.key_terms[head], list[jax.Array]()
    for n in range(spec.queries_per_product):
        index = head if spec.num_lists > 1 else 0
        terms = refs.list_terms[index, first_query + n, pl.ds(tile * groups, groups), :]
        terms = jnp.where(terms > -jnp.inf, terms + key_terms, -jnp.inf)
        shape = (spec.rows_per_query, LANES)
        results.append(jnp.concatenate([jnp.broadcast_to(terms[m : m + 1], shape) for m in range(groups)], axis=1))
    return jnp.concatenate(results)


def _store(refs: TokenSparseRefs, spec: TokenSparseSpec, head: int) -> None:
    """Stores the outputs and log-sum-exps of the rows of a KV head."""
    row_sum = jnp.broadcast_to(jnp.sum(refs.row_sum[head], axis=1, keepdims=True), (spec.tile_rows, LANES))
    attends = row_sum != 0  # also where it is NaN
    denominator = jnp.where(attends, row_sum, 1.0)
    output = refs.acc[head] / repeat_lanes(denominator, spec.value_width)
    refs.output[head] = output.astype(refs.output.dtype)
    lse = (jnp.log2(denominator) + refs.row_max[head]) * (1.0 / LOG2E)
    refs.lse[head] = jnp.where(attends, lse, -jnp.inf)
