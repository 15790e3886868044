"""The positions of the K largest scores of each query in a list of its selected keys, which is in the order of keys.

1. The K-th largest score of each query, two bits per pass, by counting the scores that are at least as large.
2. What is selected: scores above it and, in order of keys, as many equal to it as are left to K. Products with
   triangular matrices count the selected keys before each one: its position.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ejkernel_pallas.tpu.lightning_indexer_decode.kernels.refs import IndexerDecodeRefs
from ejkernel_pallas.tpu.lightning_indexer_decode.kernels.score_tile import NOT_SELECTABLE
from ejkernel_pallas.tpu.lightning_indexer_decode.spec import IndexerDecodeSpec
from ejkernel_pallas.tpu.mosaic.loops import fori_loop
from ejkernel_pallas.tpu.mosaic.vectors import LANES, SUBLANES, matrix_product

SCORE_BITS = 32
BITS_PER_PASS = 2
"""Bits that a pass over the scores finds: the sum of its counts takes longer than the counts of another threshold."""
LARGEST = 2**31 - 1


def for_each_block(bounds: tuple[Any, Any], size: int, body: Callable[[Any, Any], Any], carry: Any) -> Any:
    """Returns the carry after the blocks of rows between two bounds; `body` gets the first row of each."""
    first, end = (lax.div(jnp.int32(x), jnp.int32(size)) for x in bounds)
    return fori_loop(first, end, lambda n, carry: body(pl.multiple_of(n * size, size), carry), carry)


def kth_largest(refs: IndexerDecodeRefs, spec: IndexerDecodeSpec, bounds: tuple[Any, Any]) -> list[jax.Array]:
    """Returns the K-th largest ordered score of each query, [1, 1]; the least integer if fewer are selectable."""

    def find_digit(n: Any, thresholds: list[jax.Array]) -> list[jax.Array]:
        shift = jnp.int32(SCORE_BITS - BITS_PER_PASS) - n * BITS_PER_PASS
        # The first bit is that of the sign, which is set in smaller numbers.
        digits = [lax.shift_left(jnp.int32(d), shift) for d in range(1, 2**BITS_PER_PASS)]
        larger = [[x ^ digit for digit in digits] for x in thresholds]
        counts = _counts(refs, spec, bounds, larger)
        results = []
        for threshold, numbers, of_numbers in zip(thresholds, larger, counts, strict=True):
            for number, count in zip(numbers, of_numbers, strict=True):
                threshold = jnp.where(count >= spec.top_k, number, threshold)
            results.append(threshold)
        return results

    start = [jnp.full((1, 1), NOT_SELECTABLE, jnp.int32)] * spec.num_queries
    return fori_loop(0, SCORE_BITS // BITS_PER_PASS, find_digit, start)


def _counts(
    refs: IndexerDecodeRefs,
    spec: IndexerDecodeSpec,
    bounds: tuple[Any, Any],
    thresholds: Sequence[Sequence[jax.Array]],
) -> list[list[jax.Array]]:
    """Returns how many scores of each query are at least as large as each of its thresholds, [1, 1] float32."""

    def add_block(row: Any, counts: list[list[jax.Array]]) -> list[list[jax.Array]]:
        scores = [refs.ordered_scores[t, pl.ds(row, spec.rows_per_step), :] for t in range(spec.num_queries)]
        return jax.tree.map(
            lambda count, threshold, t: count + _fold(jnp.where(scores[t] >= threshold, 1.0, 0.0)),
            counts,
            list(map(list, thresholds)),
            [[t] * len(x) for t, x in enumerate(thresholds)],
        )

    zeros = jnp.zeros((SUBLANES, LANES), jnp.float32)
    counts = for_each_block(bounds, spec.rows_per_step, add_block, [[zeros] * len(x) for x in thresholds])
    return jax.tree.map(lambda x: jnp.sum(jnp.sum(x, axis=0, keepdims=True), axis=1, keepdims=True), counts)


def _fold(x: jax.Array) -> jax.Array:
    """Returns the sum of an array's registers, [8, 128]."""
    return jnp.sum(x.reshape(-1, SUBLANES, LANES), axis=0)


def num_larger(
    refs: IndexerDecodeRefs, spec: IndexerDecodeSpec, bounds: tuple[Any, Any], thresholds: Sequence[jax.Array]
) -> list[jax.Array]:
    """Returns the number of scores of each query that are larger than its threshold, [1, 1] float32."""
    counts = _counts(refs, spec, bounds, [[x + 1] for x in thresholds])
    return [jnp.where(x == LARGEST, 0.0, n) for x, (n,) in zip(thresholds, counts, strict=True)]


def store_positions(refs: IndexerDecodeRefs, spec: IndexerDecodeSpec, bounds: tuple[Any, Any], t: Any) -> jax.Array:
    """Stores the position of every key in the list of query t, -1 for one that is not selected; returns how many are,
    [1, 128] int32.

    Args:
        refs: The kernel's refs.
        spec: Its constants.
        bounds: The first row of keys, and the row after the last one.
        t: The query.
    """
    size, threshold, num_ties = spec.rows_per_step, refs.thresholds[pl.ds(t, 1), :], refs.num_ties[pl.ds(t, 1), :]
    row, column = (lax.broadcasted_iota(jnp.int32, (LANES, LANES), axis) for axis in (0, 1))
    lanes_before = jnp.where(row < column, 1.0, 0.0).astype(jnp.bfloat16)
    all_lanes = jnp.ones((LANES, LANES), jnp.bfloat16)
    row, column = (lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
    rows_before = jnp.where(column < row, 1.0, 0.0).astype(jnp.bfloat16)

    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        return matrix_product(a.astype(jnp.bfloat16), b.astype(jnp.bfloat16), (1, 0), lax.Precision.DEFAULT)

    def ranks(selected: jax.Array, earlier: jax.Array) -> tuple[jax.Array, jax.Array]:
        counts = jnp.where(selected, 1.0, 0.0)
        totals = product(counts, all_lanes)  # at most 128, which bfloat16 holds
        before = earlier + product(rows_before, totals)
        return before + product(counts, lanes_before), (before + totals)[size - 1 :]

    def store_block(start: Any, earlier: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        rows = pl.ds(start, size)
        in_order = refs.ordered_scores[t, rows, :]
        is_tie = (in_order == threshold) & (in_order > NOT_SELECTABLE)
        tie_rank, ties = ranks(is_tie, earlier[0])
        selected = (in_order > threshold) | (is_tie & (tie_rank < num_ties))
        rank, total = ranks(selected, earlier[1])
        refs.positions[rows, :] = jnp.where(selected, rank.astype(jnp.int32), -1)
        return ties, total

    zeros = jnp.zeros((1, LANES), jnp.float32)
    return for_each_block(bounds, size, store_block, (zeros, zeros))[1].astype(jnp.int32)
