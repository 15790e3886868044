"""Counts how often each query of a tile lists each key, and the keys of each group that some query lists.

A key's index has two digits: the high one is the index divided by 128, the low one the remainder. A product of a list's
one-hot vectors of both, summed over the list, counts how often each pair of digits is there.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ejkernel_pallas.tpu.mosaic.loops import for_each_index, fori_loop
from ejkernel_pallas.tpu.mosaic.vectors import LANES, matrix_product
from ejkernel_pallas.tpu.token_sparse_attention_union.config import GROUP
from ejkernel_pallas.tpu.token_sparse_attention_union.kernels.refs import UnionRefs
from ejkernel_pallas.tpu.token_sparse_attention_union.spec import UnionSpec

LANE_BITS = LANES.bit_length() - 1


def count_listed(refs: UnionRefs, spec: UnionSpec, first: Any, end: Any) -> None:
    """Stores the counts of all queries for the tiles of keys from `first` to `end`, and more of them around."""
    groups = spec.block_kv // LANES
    first, end = lax.div(first * groups, spec.count_rows), lax.div(end * groups + spec.count_rows - 1, spec.count_rows)
    num_pieces = spec.list_length // spec.list_piece
    digit = lax.broadcasted_iota(jnp.int32, (LANES, spec.list_piece), 0)
    row = lax.broadcasted_iota(jnp.int32, (spec.count_rows, spec.list_piece), 0)

    def count_query(query: Any) -> None:
        def count_piece(first_row: Any, piece: Any) -> jax.Array:
            entries = pl.ds(pl.multiple_of(piece * spec.list_piece, spec.list_piece), spec.list_piece)
            listed = refs.indices[pl.ds(query, 1), entries]
            high, low = lax.shift_right_arithmetic(listed, jnp.int32(LANE_BITS)), listed & (LANES - 1)
            is_low = jnp.where(digit == low, 1.0, 0.0).astype(jnp.bfloat16)
            is_high = jnp.where(row == high - first_row, 1.0, 0.0).astype(jnp.bfloat16)
            return matrix_product(is_high, is_low, (1, 1), lax.Precision.DEFAULT)

        def count_rows(n: Any, carry: None) -> None:
            first_row = pl.multiple_of(n * spec.count_rows, spec.count_rows)
            if num_pieces == 1:
                counts = count_piece(first_row, 0)
            else:
                zeros = jnp.zeros((spec.count_rows, LANES), jnp.float32)
                counts = fori_loop(0, num_pieces, lambda piece, sums: sums + count_piece(first_row, piece), zeros)
            refs.counts[pl.ds(first_row, spec.count_rows), query, :] = counts

        fori_loop(first, end, count_rows, None)

    for_each_index(spec.block_q, count_query)


def count_groups(refs: UnionRefs, spec: UnionSpec, first_group: Any) -> None:
    """Stores how many keys of each group of this step some query lists, and adds the entries that are not finite.

    Args:
        refs: The kernel's arrays.
        spec: The kernel's constants.
        first_group: The first group of 128 keys of this step.
    """
    not_finite = refs.not_finite_counts[...]
    per_group = GROUP // LANES
    for n in range(spec.block_kv // GROUP):
        counts = refs.counts[pl.ds(first_group + n * per_group, per_group)]
        is_used = jnp.where(jnp.max(counts, axis=1) > 0, 1.0, 0.0)
        refs.group_counts[n] = jnp.sum(is_used).astype(jnp.int32)
        for m in range(per_group):
            row = n * per_group + m
            not_finite += counts[m] * refs.is_not_finite[row : row + 1, :]
    refs.not_finite_counts[...] = not_finite
