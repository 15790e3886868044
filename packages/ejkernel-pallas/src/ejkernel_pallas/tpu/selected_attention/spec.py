"""The compile-time constants of the kernels of the selected branch."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax

from ejkernel.arithmetic import LOG2E, cdiv
from ejkernel.families.selected_attention import SelectedAttention
from ejkernel.ops.params import Direction
from ejkernel.planning.precision import product_precision
from ejkernel_pallas.tpu.mosaic.vectors import pad_to_lanes
from ejkernel_pallas.tpu.selected_attention import config as tiles
from ejkernel_pallas.tpu.selected_attention.config import TpuSelected

TOKEN_BITS = 11
"""How many bits of an entry of the work list hold a query's index in its tile."""
LIMIT_BITS = 8
"""How many bits after those hold its limit; the bit after them says that it attends to the second block alone."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelectedSpec:
    """Constants of the kernels.

    Attributes:
        num_tokens: T.
        block_q: Queries per tile.
        num_query_tiles: The number of tiles of queries.
        group_size: The number of query heads per KV head.
        rows_per_token: `group_size`, padded to whole registers.
        key_width: Head dimension of queries and keys, padded to whole lanes.
        value_width: Head dimension of values, padded to whole lanes.
        blocks_per_part: The number of blocks in a part: 1 or 2.
        parts_per_block: The number of parts that a block of keys is split into.
        keys_per_part: Keys per part.
        padded_keys_per_part: `keys_per_part`, padded to whole registers.
        num_parts: The number of parts of all blocks.
        parts_per_tile: Parts per tile of keys.
        num_key_tiles: The number of tiles of keys.
        num_rounds: How often a tile of queries meets the tiles of keys; a second time if sums leave float32's range.
        readers_per_product: The number of queries in one product, all of which read the same part.
        max_items_per_query_tile: The largest number of products of a tile of queries.
        words_per_work_list: 32-bit words of the work list of a tile of queries.
        score_scale: Factor on the scores.
        log2_scale: `score_scale` times log2(e), for scores that are exponents of two.
        precision: Precision of the products.
        row_dtype: Dtype of the rows of queries in VMEM, of which a token's rows fill whole registers.
        operand_dtype: Dtype of the operands of products.
    """

    num_tokens: int
    block_q: int
    num_query_tiles: int
    group_size: int
    rows_per_token: int
    key_width: int
    value_width: int
    blocks_per_part: int
    parts_per_block: int
    keys_per_part: int
    padded_keys_per_part: int
    num_parts: int
    parts_per_tile: int
    num_key_tiles: int
    num_rounds: int
    readers_per_product: int
    max_items_per_query_tile: int
    words_per_work_list: int
    score_scale: float
    log2_scale: float
    precision: lax.Precision | None
    row_dtype: Any
    operand_dtype: Any

    @property
    def filler_token(self) -> int:
        """Returns the index of the token that fills up products with too few queries; no query has its state."""
        return self.block_q


def make_spec(record: SelectedAttention, config: TpuSelected, direction: Direction) -> SelectedSpec:
    """Returns the constants of a record's kernels of a pass."""
    config = tiles.fit_config(record, config, direction)
    (_, tokens, heads, head_dim), (kv_heads, value_dim) = record.query.shape, record.value.shape[2:]
    rows, dtype = tiles.rows_per_token(record), record.query.dtype
    splits, size = tiles.parts_per_block_and_keys_per_part(record)
    keys, per_tile, key_tiles = tiles.key_tile_sizes(record, config)
    return SelectedSpec(
        num_tokens=tokens,
        block_q=config.block_q,
        num_query_tiles=cdiv(tokens, config.block_q),
        group_size=heads // kv_heads,
        rows_per_token=rows,
        key_width=pad_to_lanes(head_dim),
        value_width=pad_to_lanes(value_dim),
        blocks_per_part=tiles.blocks_per_part(record),
        parts_per_block=splits,
        keys_per_part=size,
        padded_keys_per_part=keys,
        num_parts=tiles.num_parts(record),
        parts_per_tile=per_tile,
        num_key_tiles=key_tiles,
        num_rounds=2 if direction == "forward" else 1,
        readers_per_product=config.readers,
        max_items_per_query_tile=tiles.max_items_per_query_tile(record, config),
        words_per_work_list=tiles.work_list_words(record, config),
        score_scale=record.softmax_scale,
        log2_scale=record.softmax_scale * LOG2E,
        precision=product_precision(dtype),
        row_dtype=jnp.dtype(jnp.float32) if rows < 16 else dtype,
        operand_dtype=dtype,
    )
