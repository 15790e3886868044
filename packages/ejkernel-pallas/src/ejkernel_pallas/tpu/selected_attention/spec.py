"""The compile-time constants of the kernels of the selected branch."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax

from ejkernel.arithmetic import LOG2E, cdiv
from ejkernel.families.selected_attention import SelectedAttention, blocks
from ejkernel.planning.precision import product_precision
from ejkernel_pallas.tpu.selected_attention import config as tiles
from ejkernel_pallas.tpu.selected_attention.config import TpuSelected

TOKEN_BITS = 11
"""Bits of an entry of the work list that hold a query's index in its tile."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelectedSpec:
    """Constants of the kernels.

    Attributes:
        tokens: T.
        block_q: Queries of a tile.
        query_tiles: Tiles of queries.
        group: Query heads per KV head.
        rows: Rows of a token: `group`, padded.
        width: Head dimension of queries and keys, padded.
        value_width: Head dimension of values, padded.
        splits: Parts that a block is split into.
        size: Keys of a part.
        keys: Keys of a part, padded.
        parts: All parts of blocks.
        tile_parts: Parts of a tile of keys.
        key_tiles: Tiles of keys.
        readers: Queries of a product.
        max_items: The largest number of products of a tile of queries.
        words: Words of a work list.
        scale: Factor on the scores.
        log2_scale: The same, for scores that are exponents of two.
        precision: Precision of the products.
        row_dtype: Dtype of the rows of queries in VMEM, of which a token's rows fill whole registers.
        dtype: Dtype of the operands of products.
    """

    tokens: int
    block_q: int
    query_tiles: int
    group: int
    rows: int
    width: int
    value_width: int
    splits: int
    size: int
    keys: int
    parts: int
    tile_parts: int
    key_tiles: int
    readers: int
    max_items: int
    words: int
    scale: float
    log2_scale: float
    precision: lax.Precision | None
    row_dtype: Any
    dtype: Any

    @property
    def dummy(self) -> int:
        """Returns the index of the token that fills up products: its state is not a query's."""
        return self.block_q


def make_spec(record: SelectedAttention, config: TpuSelected) -> SelectedSpec:
    """Returns the constants of a record's kernels."""
    config = tiles.fit_config(record, config)
    (_, tokens, heads, head_dim), (kv_heads, value_dim) = record.query.shape, record.value.shape[2:]
    rows, dtype = tiles.rows_per_token(record), record.query.dtype
    splits, size = tiles.split_of_blocks(record)
    keys, per_tile, key_tiles = tiles.key_tile_sizes(record, config)
    return SelectedSpec(
        tokens=tokens,
        block_q=config.block_q,
        query_tiles=cdiv(tokens, config.block_q),
        group=heads // kv_heads,
        rows=rows,
        width=tiles.padded_lanes(head_dim),
        value_width=tiles.padded_lanes(value_dim),
        splits=splits,
        size=size,
        keys=keys,
        parts=splits * blocks(record),
        tile_parts=per_tile,
        key_tiles=key_tiles,
        readers=config.readers,
        max_items=tiles.max_items(record, config),
        words=tiles.work_list_words(record, config),
        scale=record.softmax_scale,
        log2_scale=record.softmax_scale * LOG2E,
        precision=product_precision(dtype),
        row_dtype=jnp.dtype(jnp.float32) if rows < 16 else dtype,
        dtype=dtype,
    )
