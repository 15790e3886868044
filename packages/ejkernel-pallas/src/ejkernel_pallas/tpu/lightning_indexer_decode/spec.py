"""The compile-time constants of the decode step's kernel."""

import dataclasses

from jax import lax

from ejkernel.families.lightning_indexer import LightningIndexer
from ejkernel.planning.precision import product_precision
from ejkernel_pallas.tpu.lightning_indexer_decode import config as tiles
from ejkernel_pallas.tpu.lightning_indexer_decode.config import TpuIndexerDecodeTiles
from ejkernel_pallas.tpu.mosaic.vectors import LANES

MAX_ROWS_PER_STEP = 64
"""The most rows of 128 keys of a step of a loop."""
SCORE_BYTES = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexerDecodeSpec:
    """Constants of the kernel.

    Attributes:
        num_queries: T, queries per batch row.
        num_heads: H.
        padded_heads: H, padded to whole registers.
        top_k: K.
        list_rows: Rows of 128 keys of a list, a multiple of 8.
        block_k: Keys per tile.
        num_key_tiles: Tiles of keys per batch row.
        slots_per_page: Slots of a page; 0 for dense keys.
        operand_dtype: Dtype of the queries and of products' operands.
        rectify: Whether negative products count as 0.
        has_key_scales: Whether products are multiplied by a factor of each key.
        precision: Precision of the products.
    """

    num_queries: int
    num_heads: int
    padded_heads: int
    top_k: int
    list_rows: int
    block_k: int
    num_key_tiles: int
    slots_per_page: int
    operand_dtype: str
    rectify: bool
    has_key_scales: bool
    precision: lax.Precision | None

    @property
    def rows_per_tile(self) -> int:
        """Returns the rows of 128 keys per tile."""
        return self.block_k // LANES

    @property
    def num_rows(self) -> int:
        """Returns the rows of 128 keys per batch row."""
        return self.num_key_tiles * self.rows_per_tile

    @property
    def rows_per_step(self) -> int:
        """Returns the rows of 128 keys of a step of a loop: a power of two that divides a tile."""
        return min(MAX_ROWS_PER_STEP, self.rows_per_tile & -self.rows_per_tile)

    @property
    def num_pieces(self) -> int:
        """Returns the bytes that a score and the index of its key are moved in."""
        return SCORE_BYTES + (2 if self.num_rows <= 256 else 3)

    @property
    def pages_per_tile(self) -> int:
        """Returns the pages of a tile; 0 for dense keys."""
        return self.block_k // self.slots_per_page if self.slots_per_page else 0


def make_spec(record: LightningIndexer, config: TpuIndexerDecodeTiles) -> IndexerDecodeSpec:
    """Returns the constants of a record's kernel."""
    _, tokens, heads, _ = record.query.shape
    block_k = tiles.fit_config(record, config).block_k
    return IndexerDecodeSpec(
        num_queries=tokens,
        num_heads=heads,
        padded_heads=tiles.padded_heads(record),
        top_k=record.top_k,
        list_rows=tiles.list_rows(record.top_k),
        block_k=block_k,
        num_key_tiles=tiles.num_key_tiles(record, block_k),
        slots_per_page=0 if record.block_tables is None else record.key.shape[1],
        operand_dtype=record.query.dtype.name,
        rectify=record.rectify,
        has_key_scales=record.key_scales is not None,
        precision=product_precision(record.query.dtype),
    )
