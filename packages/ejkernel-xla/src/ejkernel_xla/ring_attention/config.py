"""Tile sizes: those of tiled attention, cut so that no tile lies in both halves of a part."""

import dataclasses
from typing import Any

from ejkernel.families.ring_attention import RingAttention, as_tiled_attention
from ejkernel.ops.params import Direction
from ejkernel_xla.tiled_attention import config
from ejkernel_xla.tiled_attention.config import ChunkedSoftmax


def heuristic(record: RingAttention, device: Any, direction: Direction) -> ChunkedSoftmax:
    """Returns tile sizes for a record on a device, not measured."""
    return _halve_blocks(record, config.heuristic(as_tiled_attention(record), device, direction))


def candidates(record: RingAttention, device: Any, direction: Direction) -> tuple[ChunkedSoftmax, ...]:
    """Returns tile sizes worth measuring for a record on a device."""
    whole_shard_candidates = config.candidates(as_tiled_attention(record), device, direction)
    return tuple(dict.fromkeys(_halve_blocks(record, params) for params in whole_shard_candidates))


def _halve_blocks(record: RingAttention, params: ChunkedSoftmax) -> ChunkedSoftmax:
    """Returns `params` with blocks that divide half of a device's part. In a causal ring, the part consists of two
    halves, which are far apart in the sequence.
    """
    if record.axis_name is None or not record.causal:
        return params
    return dataclasses.replace(
        params,
        block_q=_largest_divisor(record.query.shape[1] // 2, params.block_q),
        block_kv=_largest_divisor(record.key.shape[1] // 2, params.block_kv),
    )


def _largest_divisor(length: int, block: int) -> int:
    """Returns the largest divisor of a length up to a block; the block itself where that would be a sliver."""
    block = max(1, min(length, block))
    divisor = max(d for d in range(1, block + 1) if length % d == 0)
    return divisor if 4 * divisor >= block else block
