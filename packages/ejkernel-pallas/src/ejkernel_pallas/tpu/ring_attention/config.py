"""Tile sizes: those of tiled attention, reduced so that no tile is in both halves of a shard."""

import dataclasses
from typing import Any

from ejkernel.families.ring_attention import RingAttention, as_tiled_attention
from ejkernel.ops.params import Direction
from ejkernel_pallas.tpu.mosaic.vectors import LANES
from ejkernel_pallas.tpu.tiled_attention import config as tiled_config
from ejkernel_pallas.tpu.tiled_attention.config import PUBLIC_FIELDS, TpuBackward, TpuForward
from ejkernel_pallas.tpu.tiled_attention.spec import TileSizes

__all__ = ["PUBLIC_FIELDS", "candidates", "fit_blocks_to_shard", "heuristic"]


def heuristic(record: RingAttention, device: Any, direction: Direction) -> TpuForward | TpuBackward:
    """Returns tile sizes for a record on a device, found with the static profile of tiled attention.

    A kernel with remote copies has tiles of both backward passes in memory, so large ones are used for heads of up to
    128. Where dq has large tiles, dkv has them on every chip: smaller ones spill on v7x, and take longer.
    """
    tiles = tiled_config.heuristic(as_tiled_attention(record), device, direction, max_head_dim=LANES)
    return dataclasses.replace(tiles, dkv=tiles.dq) if isinstance(tiles, TpuBackward) else tiles


def candidates(
    record: RingAttention, device: Any, direction: Direction
) -> tuple[TpuForward, ...] | tuple[TpuBackward, ...]:
    """Returns tile sizes worth measuring for a record on a device."""
    return tiled_config.candidates(as_tiled_attention(record), device, direction)


def fit_blocks_to_shard(record: RingAttention, blocks: TileSizes) -> TileSizes:
    """Returns the blocks, no larger than half of a shard where that can be divided into whole tiles."""
    pieces = 2 if record.causal else 1
    queries, keys = record.query.shape[1] // pieces, record.key.shape[1] // pieces
    return blocks._replace(
        queries=_largest_dividing_block(queries, blocks.queries), keys=_largest_dividing_block(keys, blocks.keys)
    )


def _largest_dividing_block(length: int, block: int) -> int:
    """Returns the largest tile size up to `block` that divides a length, or `block` itself if none does."""
    sizes = range(LANES, min(block, length) + 1, LANES)
    return max((size for size in sizes if length % size == 0), default=block)
