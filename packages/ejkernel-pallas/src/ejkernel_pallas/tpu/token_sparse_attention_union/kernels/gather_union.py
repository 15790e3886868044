"""Moves the keys that some query of a tile lists to the front, with a term per query.

A term is log2 of how often the query lists the key, or a mask, divided by the factor on the scores. It is in lanes of
the key that are padding, so that the product with the queries, which have 1 there, adds it. The part of a term that
bfloat16 rounds off is a second term.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ejkernel_pallas.tpu.mosaic.loops import fori_loop
from ejkernel_pallas.tpu.mosaic.vectors import LANES, matrix_product
from ejkernel_pallas.tpu.token_sparse_attention_union.config import GROUP, PIECE
from ejkernel_pallas.tpu.token_sparse_attention_union.kernels.refs import UnionRefs
from ejkernel_pallas.tpu.token_sparse_attention_union.spec import UnionSpec

MASK = -1e37
"""A term of a query that does not list the key: less than the running maximum of any row after the factor on scores."""
BFLOAT16_BITS = -(2**16)
"""The bits of a float32 that bfloat16 has."""
ALIGNMENT = 16
"""Slots of the union that share registers; a group begins at a multiple."""


def mask_term(spec: UnionSpec) -> float:
    """Returns the mask, with the sign that makes it negative after the factor on scores."""
    return MASK if spec.log2_scale > 0 else -MASK


def store_tails(refs: UnionRefs, spec: UnionSpec, first_group: Any) -> None:
    """Stores the last lanes of the keys of this step with the terms of the tile's queries."""
    for n in range(spec.block_kv // LANES):
        counts = refs.counts[first_group + n]
        terms = jnp.where(counts > 0, jnp.log2(jnp.maximum(counts, 1.0)) * (1.0 / spec.log2_scale), mask_term(spec))
        # A cast to bfloat16 and back might be removed.
        bits = lax.bitcast_convert_type(terms, jnp.int32) & jnp.int32(BFLOAT16_BITS)
        high = lax.bitcast_convert_type(bits, jnp.float32)
        low = jnp.where(counts > 0, terms - high, 0.0)
        padding = jnp.zeros((LANES - 2 * spec.block_q, LANES), jnp.float32)
        tail = jnp.concatenate([padding, high, low]).T
        keys = slice(n * LANES, (n + 1) * LANES)
        key = refs.key[keys, spec.body_width :]
        refs.tail[keys, :] = (key.astype(jnp.float32) + tail).astype(key.dtype)


def store_slots(refs: UnionRefs, spec: UnionSpec, first_group: Any) -> None:
    """Stores the slot of each key of this step among the keys of its group that some query lists, -1 for others."""
    groups, per_group = spec.block_kv // GROUP, GROUP // LANES
    used = jnp.max(refs.counts[pl.ds(first_group, groups * per_group)], axis=1)
    rows = [jnp.concatenate([used[n * per_group + m][None] for m in range(per_group)], axis=1) for n in range(groups)]
    is_used = jnp.where(jnp.concatenate(rows) > 0, 1.0, 0.0)
    slot = matrix_product(is_used.astype(jnp.bfloat16), refs.is_before[...], (1, 0), lax.Precision.DEFAULT)
    refs.slots[...] = jnp.where(is_used > 0, slot, -1.0).astype(jnp.int32)


def append_groups(refs: UnionRefs, spec: UnionSpec, first: Any) -> None:
    """Appends the keys of some groups of this step that some query lists to the union.

    Products of all groups are independent, so that they hide each other's latency. The rows of a group are computed in
    pieces, the last ones first: what a piece has after the group's last key is overwritten by the groups after it.
    """
    counts = [refs.group_counts[first + n] for n in range(spec.groups_per_append)]
    starts = [refs.union_end[0]]
    for count in counts:
        starts.append(starts[-1] + ((count + (ALIGNMENT - 1)) & -ALIGNMENT))
    most = functools.reduce(jnp.maximum, counts)
    pieces = lax.shift_right_logical(most + (PIECE - 1), jnp.int32(PIECE.bit_length() - 1))

    def append_pieces(n: Any, carry: None) -> None:
        first_row = (pieces - 1 - n) * PIECE
        for group, (count, start) in enumerate(zip(counts, starts[:-1], strict=True)):
            _append_piece(refs, spec, first + group, count, start, first_row)

    fori_loop(0, pieces, append_pieces, None)
    refs.union_end[0] = starts[-1]


def _append_piece(refs: UnionRefs, spec: UnionSpec, group: Any, count: Any, start: Any, first_row: Any) -> None:
    """Stores some keys of a group in the union.

    Args:
        refs: The kernel's arrays.
        spec: The kernel's constants.
        group: The group of this step.
        count: How many of its keys some query lists.
        start: The slot of the first of these in the union.
        first_row: The first one that is stored.
    """
    keys = pl.ds(pl.multiple_of(group * GROUP, GROUP), GROUP)
    row = lax.broadcasted_iota(jnp.int32, (PIECE, GROUP), 0) + first_row
    is_slot = jnp.where(row == refs.slots[pl.ds(group, 1), :], 1.0, 0.0).astype(refs.union.dtype)
    slots = pl.ds(pl.multiple_of(start + first_row, ALIGNMENT), PIECE)
    if spec.body_width:
        body = matrix_product(is_slot, refs.key[keys, : spec.body_width], (1, 0), spec.precision)
        refs.union[slots, : spec.body_width] = body.astype(refs.union.dtype)
    tail = matrix_product(is_slot, refs.tail[keys, :], (1, 0), spec.precision)
    is_padding = (row[:, :LANES] >= count) & _is_high_term(spec, PIECE)
    refs.union[slots, spec.body_width :] = jnp.where(is_padding, mask_term(spec), tail).astype(refs.union.dtype)


def move_left(refs: UnionRefs, spec: UnionSpec) -> None:
    """Moves the keys after the first ones, which were attended, to the front."""
    left = refs.union_end[0] - spec.product_keys

    def move_piece(n: Any, carry: None) -> None:
        source = pl.ds(pl.multiple_of(spec.product_keys + n * PIECE, PIECE), PIECE)
        refs.union[pl.ds(pl.multiple_of(n * PIECE, PIECE), PIECE), :] = refs.union[source, :]

    fori_loop(0, lax.shift_right_logical(left + (PIECE - 1), jnp.int32(PIECE.bit_length() - 1)), move_piece, None)
    refs.union_end[0] = left


def mask_rest(refs: UnionRefs, spec: UnionSpec) -> None:
    """Masks the slots that have no key: zeros, so that no other numbers are left in them."""
    width, dtype = spec.body_width, refs.union.dtype

    def mask_slots(n: Any, carry: None) -> None:
        slots = pl.ds(pl.multiple_of(n * ALIGNMENT, ALIGNMENT), ALIGNMENT)
        if width:
            refs.union[slots, :width] = jnp.zeros((ALIGNMENT, width), dtype)
        tail = jnp.where(_is_high_term(spec, ALIGNMENT), mask_term(spec), 0.0)
        refs.union[slots, width:] = tail.astype(dtype)

    first = lax.shift_right_logical(refs.union_end[0], jnp.int32(ALIGNMENT.bit_length() - 1))
    fori_loop(first, spec.product_keys // ALIGNMENT, mask_slots, None)


def _is_high_term(spec: UnionSpec, rows: int) -> jax.Array:
    """Returns whether lanes of the tails of keys are those of the first terms, [rows, 128]."""
    lane, first = lax.broadcasted_iota(jnp.int32, (rows, LANES), 1), spec.first_term - spec.body_width
    return (lane >= first) & (lane < first + spec.block_q)
