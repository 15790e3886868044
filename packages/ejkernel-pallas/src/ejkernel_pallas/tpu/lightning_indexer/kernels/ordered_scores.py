"""The scores of a tile of keys for a block of queries, as integers that sort in the order of the floats."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ejkernel.families.expert_routing import order_preserving_integers
from ejkernel.families.lightning_indexer import rectify
from ejkernel_pallas.tpu.lightning_indexer.config import BLOCK_Q, KEYS_PER_PRODUCT
from ejkernel_pallas.tpu.lightning_indexer.kernels.refs import IndexerRefs
from ejkernel_pallas.tpu.lightning_indexer.spec import IndexerSpec
from ejkernel_pallas.tpu.mosaic.loops import for_each_index
from ejkernel_pallas.tpu.mosaic.vectors import LANES, matrix_product, row_to_column

NOT_SELECTABLE = -(2**31)
"""The ordered score of a key that a query may not select; no number has it."""


def score_tile(refs: IndexerRefs, spec: IndexerSpec, tile: Any, first_row: Any) -> None:
    """Stores the ordered scores of a tile of keys in the rows from `first_row` on."""

    def score_keys(n: Any) -> None:
        start = pl.multiple_of(n * KEYS_PER_PRODUCT, KEYS_PER_PRODUCT)
        scores = _scores(refs, spec, start)
        key = tile * spec.block_k + start + lax.broadcasted_iota(jnp.int32, scores.shape, 0)
        is_selectable = (key >= refs.key_starts[...]) & (key < refs.key_ends[...])
        rows = pl.ds(pl.multiple_of(first_row + start, LANES), KEYS_PER_PRODUCT)
        refs.ordered_scores[rows, :] = jnp.where(is_selectable, order_preserving_integers(scores), NOT_SELECTABLE)

    for_each_index(spec.block_k // KEYS_PER_PRODUCT, score_keys)


def _scores(refs: IndexerRefs, spec: IndexerSpec, start: Any) -> jax.Array:
    """Returns the scores of 256 keys, [256, 128]. Queries of a head are what the matrix unit holds while keys pass."""
    key = refs.key[pl.ds(start, KEYS_PER_PRODUCT), :]
    scales = None
    if spec.has_key_scales:
        rows = (refs.key_scales[:, pl.ds(start + n, LANES)] for n in range(0, KEYS_PER_PRODUCT, LANES))
        scales = jnp.concatenate([row_to_column(row) for row in rows])

    def add_heads(step: Any, scores: jax.Array) -> jax.Array:
        head = step * spec.heads_per_step
        rows = pl.multiple_of(head * BLOCK_Q, BLOCK_Q)
        query = refs.query[pl.ds(rows, spec.heads_per_step * BLOCK_Q), :]
        products = matrix_product(key, query, (1, 1), spec.precision)
        for n in range(spec.heads_per_step):
            of_head = products[:, n * BLOCK_Q : (n + 1) * BLOCK_Q]
            of_head = of_head if scales is None else of_head * scales
            of_head = rectify(of_head) if spec.rectify else of_head
            scores = scores + of_head * refs.weights[pl.ds(head + n, 1), :]
        return scores

    scores, steps = jnp.zeros((KEYS_PER_PRODUCT, BLOCK_Q), jnp.float32), spec.num_heads // spec.heads_per_step
    return add_heads(0, scores) if steps == 1 else lax.fori_loop(0, steps, add_heads, scores)
