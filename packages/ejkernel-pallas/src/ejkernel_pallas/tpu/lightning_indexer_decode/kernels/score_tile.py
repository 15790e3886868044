"""The scores of a tile of keys for all queries of a row, as integers that sort in the order of the floats."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ejkernel.families.expert_routing import order_preserving_integers
from ejkernel.families.lightning_indexer import rectify
from ejkernel_pallas.tpu.lightning_indexer_decode.config import KEYS_PER_STEP
from ejkernel_pallas.tpu.lightning_indexer_decode.kernels.page_copies import (
    num_copied_pages,
    page_of_tile,
    start_next_copies,
)
from ejkernel_pallas.tpu.lightning_indexer_decode.kernels.refs import IndexerDecodeRefs
from ejkernel_pallas.tpu.lightning_indexer_decode.spec import IndexerDecodeSpec
from ejkernel_pallas.tpu.mosaic.loops import for_each_index, fori_loop
from ejkernel_pallas.tpu.mosaic.vectors import LANES, matrix_product

NOT_SELECTABLE = -(2**31)
"""The ordered score of a key that a query may not select; no number has it."""
MAX_PRODUCTS = 2**16
"""The most products of heads and keys that are computed at a time: 64 registers."""


def score_tile(refs: IndexerDecodeRefs, spec: IndexerDecodeSpec, key: Any, step: Any) -> None:
    """Stores the ordered scores of a tile of keys, [block_k, D], in its rows."""
    row, tile = refs.step_rows[step], refs.step_tiles[step]
    rows = spec.num_queries * spec.padded_heads
    size = max(LANES, min(KEYS_PER_STEP, MAX_PRODUCTS // rows // LANES * LANES))
    size = size & -size

    num_chunks = spec.block_k // size

    def score_keys(n: Any) -> None:
        if spec.slots_per_page:
            start_next_copies(refs, spec, step, n, num_chunks)
        start = pl.multiple_of(n * size, size)
        keys = key[pl.ds(start, size), :]
        keys = keys.astype(jnp.float32) if keys.dtype.itemsize == 1 else keys
        products = matrix_product(refs.query[...], keys.astype(spec.operand_dtype), (1, 1), spec.precision)
        for group in range(0, size, LANES):
            lanes = slice(group, group + LANES)
            scales = refs.key_scales[:, pl.ds(start + group, LANES)] if spec.has_key_scales else None
            first_key = tile * spec.block_k + start + group
            for t in range(spec.num_queries):
                scores = _head_sum(refs, spec, products[t * spec.padded_heads :][: spec.num_heads, lanes], scales, t)
                index = first_key + lax.broadcasted_iota(jnp.int32, scores.shape, 1)
                query = row * spec.num_queries + t
                is_selectable = (index >= refs.key_starts[query]) & (index < refs.key_ends[query])
                in_order = jnp.where(is_selectable, order_preserving_integers(scores), NOT_SELECTABLE)
                refs.ordered_scores[t, pl.ds(lax.div(first_key, jnp.int32(LANES)), 1), :] = in_order

    for_each_index(num_chunks, score_keys)
    if spec.slots_per_page:
        has_absent_pages = num_copied_pages(refs, spec, step) < spec.pages_per_tile
        pl.when(has_absent_pages)(lambda: _mask_absent_pages(refs, spec, step))


def _head_sum(refs: IndexerDecodeRefs, spec: IndexerDecodeSpec, products: Any, scales: Any, t: int) -> jax.Array:
    """Returns the scores of 128 keys for query t from its products, [H, 128] -> [1, 128]."""
    products = products if scales is None else products * scales
    products = rectify(products) if spec.rectify else products
    weights = refs.weights[pl.ds(t * spec.padded_heads, spec.num_heads), :]
    return jnp.sum(products * weights, axis=0, keepdims=True)


def _mask_absent_pages(refs: IndexerDecodeRefs, spec: IndexerDecodeSpec, step: Any) -> None:
    """Makes the keys of pages that were not copied not selectable: their buffer holds something else."""
    first_row, slots = refs.step_tiles[step] * spec.rows_per_tile, spec.slots_per_page
    rows_per_page = max(1, slots // LANES)

    def mask_page(page: Any, carry: None) -> None:
        @pl.when(page_of_tile(refs, spec, step, page) < 0)
        def _() -> None:
            lane = lax.broadcasted_iota(jnp.int32, (1, LANES), 1)
            slot_in_row = page * slots - lax.div(page * slots, jnp.int32(LANES)) * LANES
            is_absent = (lane >= slot_in_row) & (lane < slot_in_row + slots)
            first = first_row + lax.div(page * slots, jnp.int32(LANES))

            def mask_row(n: Any, carry: None) -> None:
                for t in range(spec.num_queries):
                    index = (t, pl.ds(first + n, 1), slice(None))
                    refs.ordered_scores[index] = jnp.where(is_absent, NOT_SELECTABLE, refs.ordered_scores[index])

            fori_loop(0, rows_per_page, mask_row, None)

    fori_loop(0, spec.pages_per_tile, mask_page, None)
