"""The compile-time constants of the kernel of token-sparse attention."""

import dataclasses

from jax import lax

from ejkernel.arithmetic import LOG2E, cdiv
from ejkernel.families.token_sparse_attention import TokenSparseAttention
from ejkernel.planning.precision import product_precision
from ejkernel_pallas.tpu.mosaic.vectors import pad_to_lanes
from ejkernel_pallas.tpu.token_sparse_attention import config as tiles
from ejkernel_pallas.tpu.token_sparse_attention.config import TpuTokenSparse


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenSparseSpec:
    """Constants of the kernel.

    Attributes:
        block_q: Queries per tile.
        block_kv: Keys per tile.
        num_query_tiles: Tiles of queries per batch row.
        num_key_tiles: Tiles of keys per batch row.
        kv_heads: KV heads.
        num_lists: Lists per query: one, or one per KV head.
        group_size: Query heads per KV head.
        rows_per_query: `group_size`, padded to whole registers.
        queries_per_product: Queries whose rows are multiplied at a time.
        key_width: Head size of queries and keys, padded to whole lanes.
        value_width: Head size of values, padded to whole lanes.
        values_in_keys: Whether the first entries of a key are its value.
        log2_scale: Factor on the scores, times log2(e).
        precision: Precision of the products.
    """

    block_q: int
    block_kv: int
    num_query_tiles: int
    num_key_tiles: int
    kv_heads: int
    num_lists: int
    group_size: int
    rows_per_query: int
    queries_per_product: int
    key_width: int
    value_width: int
    values_in_keys: bool
    log2_scale: float
    precision: lax.Precision | None

    @property
    def tile_rows(self) -> int:
        """Returns the rows of a tile of queries for a KV head."""
        return self.block_q * self.rows_per_query

    @property
    def product_rows(self) -> int:
        """Returns the rows that are multiplied at a time."""
        return self.queries_per_product * self.rows_per_query


def make_spec(record: TokenSparseAttention, config: TpuTokenSparse) -> TokenSparseSpec:
    """Returns the constants of a record's kernel."""
    config = tiles.fit_config(record, config)
    (_, tokens, heads, channels), (_, keys, kv_heads, _) = record.query.shape, record.key.shape
    is_wide = record.query.dtype.itemsize > 2
    product_rows = tiles.MAX_FLOAT32_PRODUCT_ROWS if is_wide else tiles.MAX_PRODUCT_ROWS
    most = max(1, product_rows // tiles.rows_per_query(record))
    return TokenSparseSpec(
        block_q=config.block_q,
        block_kv=config.block_kv,
        num_query_tiles=cdiv(tokens, config.block_q),
        num_key_tiles=cdiv(keys, config.block_kv),
        kv_heads=kv_heads,
        num_lists=record.indices.shape[2],
        group_size=heads // kv_heads,
        rows_per_query=tiles.rows_per_query(record),
        queries_per_product=max(n for n in range(1, min(most, config.block_q) + 1) if config.block_q % n == 0),
        key_width=pad_to_lanes(channels),
        value_width=pad_to_lanes(record.value_size),
        values_in_keys=record.value is None,
        log2_scale=record.softmax_scale * LOG2E,
        precision=product_precision(record.query.dtype),
    )
