"""The kernel of the lightning indexer: scores of a block of 128 queries stay in VMEM until they are selected from.

HBM   keys ── double buffer ──►  tile of keys [block_k, D]
VMEM  queries of a block         [H 128, D], once
MXU                              keys x queries of a head             for all heads
VPU                              sum of w max(0, product)
VMEM  ordered_scores             [selected keys | tiles of keys, 128 queries]
VPU   after some tiles           the K-th largest score, by bisection of its bits
                                 selected keys move up, to the first rows
      after the last tile        bitonic sort of the selected keys
HBM   indices, scores ◄───────── [128, K]

Each query has a lane, so that counting, moving and sorting are operations on whole registers.
"""

from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl

from ejkernel.families.lightning_indexer import floats_from_ordered_integers
from ejkernel_pallas.tpu.lightning_indexer.kernels.ordered_scores import NOT_SELECTABLE, score_tile
from ejkernel_pallas.tpu.lightning_indexer.kernels.refs import IndexerRefs
from ejkernel_pallas.tpu.lightning_indexer.kernels.select_rows import key_indices, select_rows
from ejkernel_pallas.tpu.lightning_indexer.kernels.sort_rows import load_positions, sort_rows
from ejkernel_pallas.tpu.lightning_indexer.spec import IndexerSpec
from ejkernel_pallas.tpu.mosaic.loops import for_each_index
from ejkernel_pallas.tpu.mosaic.vectors import LANES


def score_and_select(refs: IndexerRefs, *, spec: IndexerSpec) -> None:
    """Scores a tile of keys, selects from the scores if the buffer is full, and stores the selection after the last."""
    tile = pl.program_id(2)
    block = pl.program_id(0) * spec.num_query_blocks + pl.program_id(1)
    first, end = refs.first_key_tile[block], refs.end_key_tile[block]

    @pl.when(tile == 0)
    def _() -> None:
        kept = pl.ds(0, spec.kept_rows)
        refs.ordered_scores[kept, :] = jnp.full((spec.kept_rows, LANES), NOT_SELECTABLE, jnp.int32)
        refs.packed_indices[kept, :] = jnp.zeros((spec.kept_rows, LANES), jnp.int32)
        refs.num_scored_tiles[0] = 0

    @pl.when((tile >= first) & (tile < end))
    def _() -> None:
        scored = refs.num_scored_tiles[0]
        score_tile(refs, spec, tile, spec.kept_rows + scored * spec.block_k)
        must_select = (scored == spec.tiles_per_selection - 1) | (tile == end - 1)
        refs.num_scored_tiles[0] = jnp.where(must_select, 0, scored + 1)

        @pl.when(must_select)
        def _() -> None:
            select_rows(refs, spec, spec.kept_rows + (scored + 1) * spec.block_k, (tile - scored) * spec.block_k)

    @pl.when(tile == spec.num_key_tiles - 1)
    def _() -> None:
        sort_rows(refs, spec)
        for_each_index(spec.kept_rows // LANES, lambda block: _store(refs, spec, block))


def _store(refs: IndexerRefs, spec: IndexerSpec, block: Any) -> None:
    """Stores 128 selected keys of each query, with queries along rows."""
    in_order = load_positions(refs.ordered_scores, spec, block)
    is_key = in_order > NOT_SELECTABLE
    scores = jnp.where(is_key, floats_from_ordered_integers(in_order, jnp.float32), -jnp.inf)
    indices = jnp.where(is_key, key_indices(load_positions(refs.packed_indices, spec, block), spec), -1)
    columns = pl.ds(pl.multiple_of(block * LANES, LANES), LANES)
    refs.scores[:, columns] = scores.T
    refs.indices[:, columns] = indices.T
