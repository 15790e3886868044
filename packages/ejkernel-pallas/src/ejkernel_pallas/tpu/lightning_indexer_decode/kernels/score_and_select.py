"""The kernel of the indexer's decode step: all scores of a row's queries stay in VMEM, and are selected from once.

HBM   keys, or pages ── two buffers ──►  tile of keys [block_k, D]
MXU                                      queries x keys of all heads         [T H, keys]
VPU                                      sum of w max(0, product)
VMEM  ordered_scores                     [T, keys / 128, 128]
      after the last tile of a row, query by query:
VPU   the K-th largest score             by bisection of its bits
MXU   positions of the selected keys     counts by products with triangular matrices
MXU   list of the selected keys          moved by products with one-hot vectors
VPU   positions in descending order      counts of larger scores
MXU   sorted list                        moved by products with one-hot vectors
HBM   indices, scores ◄────────────────  [T, K]

Keys are along lanes and sublanes, so one query fills whole registers. The steps of the grid are the tiles that some
query of a row needs, row after row.
"""

from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl

from ejkernel_pallas.tpu.lightning_indexer_decode.kernels.page_copies import wait_for_pages
from ejkernel_pallas.tpu.lightning_indexer_decode.kernels.refs import IndexerDecodeRefs
from ejkernel_pallas.tpu.lightning_indexer_decode.kernels.score_tile import score_tile
from ejkernel_pallas.tpu.lightning_indexer_decode.kernels.selected_positions import (
    kth_largest,
    num_larger,
    store_positions,
)
from ejkernel_pallas.tpu.lightning_indexer_decode.kernels.sorted_list import sort_list, store_list, store_results
from ejkernel_pallas.tpu.lightning_indexer_decode.spec import IndexerDecodeSpec
from ejkernel_pallas.tpu.mosaic.loops import for_each_index
from ejkernel_pallas.tpu.mosaic.vectors import LANES


def score_and_select(refs: IndexerDecodeRefs, *, spec: IndexerDecodeSpec) -> None:
    """Scores a tile of keys, and selects after the last tile of a row."""
    step = pl.program_id(0)
    row = refs.step_rows[step]
    key = wait_for_pages(refs, spec, step) if spec.slots_per_page else refs.key
    score_tile(refs, spec, key, step)

    @pl.when(refs.step_tiles[step] == refs.end_tiles[row] - 1)
    def _() -> None:
        _select(refs, spec, row)


def _select(refs: IndexerDecodeRefs, spec: IndexerDecodeSpec, row: Any) -> None:
    """Selects from the scores of a row's queries."""
    bounds = (refs.first_tiles[row] * spec.rows_per_tile, refs.end_tiles[row] * spec.rows_per_tile)
    thresholds = kth_largest(refs, spec, bounds)
    larger = num_larger(refs, spec, bounds, thresholds)
    for t in range(spec.num_queries):
        refs.thresholds[t : t + 1, :] = jnp.broadcast_to(thresholds[t], (1, LANES))
        refs.num_ties[t : t + 1, :] = jnp.broadcast_to(spec.top_k - larger[t], (1, LANES))
    for_each_index(spec.num_queries, lambda t: _store_selection(refs, spec, bounds, t))


def _store_selection(refs: IndexerDecodeRefs, spec: IndexerDecodeSpec, bounds: tuple[Any, Any], t: Any) -> None:
    """Stores the sorted list of query t."""
    num_selected = store_positions(refs, spec, bounds, t)
    store_list(refs, spec, bounds, t, num_selected)
    sort_list(refs, spec, num_selected)
    store_results(refs, spec, t, num_selected)
