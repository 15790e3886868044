"""The compile-time constants of the indexer's kernel."""

import dataclasses
from typing import Any

from jax import lax

from ejkernel.arithmetic import cdiv
from ejkernel.families.lightning_indexer import LightningIndexer
from ejkernel.planning.precision import product_precision
from ejkernel_pallas.tpu.lightning_indexer import config as tiles
from ejkernel_pallas.tpu.lightning_indexer.config import BLOCK_Q, TpuIndexerTiles


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexerSpec:
    """Constants of the kernel.

    Attributes:
        num_heads: H.
        top_k: K.
        kept_rows: Rows of the selected keys: K, padded to a power of two of at least 256.
        block_k: Keys per tile.
        num_query_blocks: Blocks of 128 queries per batch row.
        num_key_tiles: Tiles of keys per batch row.
        tiles_per_selection: The most tiles of keys that are scored before a selection.
        shift_bits: Bits of a packed index that hold how many rows it still has to move.
        heads_per_step: Heads whose products are laid out one after another.
        rectify: Whether negative products count as 0.
        has_key_scales: Whether products are multiplied by a factor of each key.
        precision: Precision of the products.
    """

    num_heads: int
    top_k: int
    kept_rows: int
    block_k: int
    num_query_blocks: int
    num_key_tiles: int
    tiles_per_selection: int
    shift_bits: int
    heads_per_step: int
    rectify: bool
    has_key_scales: bool
    precision: lax.Precision | None

    @property
    def buffer_rows(self) -> int:
        """Returns the rows of the keys that a selection chooses from."""
        return self.kept_rows + self.tiles_per_selection * self.block_k


def make_spec(record: LightningIndexer, config: TpuIndexerTiles) -> IndexerSpec:
    """Returns the constants of a record's kernel."""
    (_, tokens, heads, _), keys = record.query.shape, record.key.shape[1]
    config = tiles.fit_config(record, config)
    most: Any = tiles.MAX_HEADS_PER_STEP if record.query.dtype.itemsize == 2 else tiles.MAX_FLOAT32_HEADS_PER_STEP
    return IndexerSpec(
        num_heads=heads,
        top_k=record.top_k,
        kept_rows=tiles.kept_rows(record.top_k),
        block_k=config.block_k,
        num_query_blocks=cdiv(tokens, BLOCK_Q),
        num_key_tiles=cdiv(keys, config.block_k),
        tiles_per_selection=config.keys_per_selection // config.block_k,
        shift_bits=tiles.shift_bits(keys),
        heads_per_step=max(n for n in range(1, min(heads, most) + 1) if heads % n == 0),
        rectify=record.rectify,
        has_key_scales=record.key_scales is not None,
        precision=product_precision(record.query.dtype),
    )
