"""Tile sizes: the heuristic, and the candidates that are worth measuring."""

import dataclasses
from typing import Any

from ejkernel.arithmetic import at_most, cdiv, known_or
from ejkernel.families.lightning_indexer import LightningIndexer, num_keys
from ejkernel.ops.params import Direction
from ejkernel.planning.fixed_tiles import TILE_ROWS
from ejkernel_xla.query_tiles import MAX_NUMBERS_PER_STEP
from ejkernel_xla.sizes import ASSUMED_KEYS, check_positive

MAX_SCORES_ON_GPU, MAX_PRODUCTS_ON_GPU = 2**23, 2**26
"""Scores of a tile of queries on a GPU, and products of its heads with a tile of keys: 32 and 256 MiB of float32.

On an H200, 4096 queries of 64 heads select 2048 of 32768 keys in 50 ms. It takes 46 ms with four times as many scores,
60 with the same tiles if they are merged, and 455 with the tiles of a CPU (docs/lab/token_sparse_attention_gpu.md).
"""
MIN_BLOCK_K = 512
"""Fewest keys per tile. Each tile is sorted together with the keys selected so far, so it has at least as many."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexerTiles:
    """The configuration of either pass.

    Attributes:
        block_q: Queries per tile.
        block_k: Keys per tile of the forward pass; the backward pass reads the selected keys.
        whole_rows: Whether the forward pass keeps all scores of a tile of queries, and sorts them once. Else a sort
            merges each tile of keys into the selection so far.
        batch_invariant: Whether all tiles have these sizes, and each batch row is computed alone.
    """

    block_q: int
    block_k: int
    whole_rows: bool = False
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        check_positive(self)


PUBLIC_FIELDS = {"block_q": "block_q", "block_k": "block_k"}
"""Public configuration field -> field of this."""


def sizes(record: LightningIndexer, config: IndexerTiles) -> tuple[int, int]:
    """Returns queries and keys per tile, no more than there are unless sizes are fixed; keys fill whole blocks."""
    block_k = config.block_k if config.batch_invariant else at_most(config.block_k, num_keys(record))
    return at_most(config.block_q, record.query.shape[1]), cdiv(block_k, record.block_size) * record.block_size


def heuristic(record: LightningIndexer, device: Any, direction: Direction) -> IndexerTiles:
    """Returns tile sizes for a record on a device, not measured."""
    if direction == "forward" and device.platform == "gpu":
        return _whole_rows(record)
    return _largest_tiles_that_fit(record, direction, max(MIN_BLOCK_K, record.top_k * record.block_size))


def batch_invariant(record: LightningIndexer, device: Any, direction: Direction) -> IndexerTiles:
    """Returns the tiles of all calls in a `batch_invariant` block."""
    return IndexerTiles(block_q=TILE_ROWS, block_k=MIN_BLOCK_K, batch_invariant=True)


def candidates(record: LightningIndexer, device: Any, direction: Direction) -> tuple[IndexerTiles, ...]:
    """Returns tile sizes worth measuring for a record on a device."""
    keys = (256, 512, 1024, 2048, 4096) if direction == "forward" else (MIN_BLOCK_K,)
    merged = (_largest_tiles_that_fit(record, direction, n) for n in keys)
    return tuple(dict.fromkeys((*merged, _whole_rows(record)) if direction == "forward" else merged))


def _whole_rows(record: LightningIndexer) -> IndexerTiles:
    """Returns tiles whose scores stay in memory."""
    (_, tokens, heads, _), keys = record.query.shape, known_or(num_keys(record), ASSUMED_KEYS)
    block_q = max(1, at_most(MAX_SCORES_ON_GPU // max(1, keys), tokens))
    block_k = max(MIN_BLOCK_K, MAX_PRODUCTS_ON_GPU // max(1, block_q * heads))
    return IndexerTiles(block_q=block_q, block_k=max(1, min(block_k, keys)), whole_rows=True)


def _largest_tiles_that_fit(record: LightningIndexer, direction: Direction, block_k: int) -> IndexerTiles:
    """Returns tiles of the given keys, with as many queries as the largest array has room for."""
    (_, tokens, heads, channels), keys = record.query.shape, num_keys(record)
    block_k = max(1, at_most(block_k, keys))
    selected = record.top_k * record.block_size
    per_query = heads * block_k if direction == "forward" else selected * max(heads, channels)
    block_q = max(1, at_most(MAX_NUMBERS_PER_STEP // max(1, per_query), tokens))
    return IndexerTiles(block_q=block_q, block_k=block_k)
