"""The compile-time constants of the kernel that attends to the union of lists."""

import dataclasses

from jax import lax

from ejkernel.arithmetic import LOG2E, cdiv
from ejkernel.families.token_sparse_attention import TokenSparseAttention
from ejkernel.planning.precision import product_precision
from ejkernel_pallas.tpu.mosaic.vectors import LANES, pad_to_lanes
from ejkernel_pallas.tpu.token_sparse_attention_union import config as tiles
from ejkernel_pallas.tpu.token_sparse_attention_union.config import TpuTokenSparseUnion


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnionSpec:
    """Constants of the kernel.

    Attributes:
        block_q: Queries per tile.
        block_kv: Keys per grid step.
        num_query_tiles: Tiles of queries per batch row.
        num_key_tiles: Grid steps over the keys of a batch row.
        rows_per_query: Query heads, padded to whole registers.
        product_rows: Rows of queries that are multiplied at a time.
        groups_per_append: Groups of keys whose rows of the union are computed at a time.
        product_keys: Keys of the union that are attended at a time.
        count_rows: Groups of 128 keys of which one product counts the entries.
        all_count_rows: Groups of 128 keys of all such products.
        list_piece: Entries of a list that one product counts.
        list_length: Entries of a list, padded to whole pieces.
        key_width: Lanes of queries and keys: channels, and terms in the last ones.
        value_width: Lanes of values and outputs.
        log2_scale: Factor on the scores, times log2(e).
        precision: Precision of the products.
    """

    block_q: int
    block_kv: int
    num_query_tiles: int
    num_key_tiles: int
    rows_per_query: int
    product_rows: int
    groups_per_append: int
    product_keys: int
    count_rows: int
    all_count_rows: int
    list_piece: int
    list_length: int
    key_width: int
    value_width: int
    log2_scale: float
    precision: lax.Precision | None

    @property
    def tile_rows(self) -> int:
        """Returns the rows of a tile of queries."""
        return self.block_q * self.rows_per_query

    @property
    def union_slots(self) -> int:
        """Returns the keys of the union that scratch memory holds: the last ones of a group's rows may be padding."""
        return self.product_keys + (self.groups_per_append + 1) * tiles.GROUP

    @property
    def first_term(self) -> int:
        """Returns the lane of a key's first term: those of all queries, and then what bfloat16 rounds off of each."""
        return self.key_width - 2 * self.block_q

    @property
    def body_width(self) -> int:
        """Returns the lanes of a key before the last 128, which have the terms."""
        return self.key_width - LANES


def make_spec(record: TokenSparseAttention, config: TpuTokenSparseUnion) -> UnionSpec:
    """Returns the constants of a record's kernel."""
    config = tiles.fit_config(record, config)
    is_wide = record.query.dtype.itemsize > 2
    most = tiles.MAX_FLOAT32_PRODUCT_ROWS if is_wide else tiles.MAX_PRODUCT_ROWS
    tile_rows, listed = config.block_q * tiles.rows_per_query(record), tiles.padded_list(record.indices.shape[3])
    count_rows, all_count_rows = tiles.count_rows(record, config)
    return UnionSpec(
        block_q=config.block_q,
        block_kv=config.block_kv,
        num_query_tiles=cdiv(record.query.shape[1], config.block_q),
        num_key_tiles=tiles.num_key_tiles(record, config),
        rows_per_query=tiles.rows_per_query(record),
        product_rows=max(n for n in range(16, min(most, tile_rows) + 1, 16) if tile_rows % n == 0),
        groups_per_append=tiles.groups_per_append(config),
        product_keys=config.union_keys,
        count_rows=count_rows,
        all_count_rows=all_count_rows,
        list_piece=min(listed, tiles.LIST_PIECE),
        list_length=listed,
        key_width=tiles.key_width(record, config),
        value_width=pad_to_lanes(record.value_size),
        log2_scale=record.softmax_scale * LOG2E,
        precision=product_precision(record.query.dtype),
    )
