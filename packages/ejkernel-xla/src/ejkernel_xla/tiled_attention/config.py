"""Tile sizes: the heuristic, and the candidates that are worth measuring."""

import dataclasses
from typing import Any

from ejkernel.families.tiled_attention import TiledAttention, causal_window_bounds
from ejkernel.ops.params import Direction
from ejkernel_xla.sizes import check_positive
from ejkernel_xla.tiled_attention.plan import SCORES_PER_STEP

DEFAULT_BLOCK = 512
"""Long enough that matrix products dominate, short enough that a causal mask or a window leaves most tiles out."""


DEFAULT_PATTERN_BLOCK = 128
"""Smaller than BLOCK, since small tiles skip more of a pattern's gaps."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkedSoftmax:
    """The configuration of either pass.

    Attributes:
        block_q: Queries per tile.
        block_kv: Keys per tile.
    """

    block_q: int
    block_kv: int

    def __post_init__(self) -> None:
        check_positive(self)


PUBLIC_FIELDS = {"q_blocksize": "block_q", "kv_blocksize": "block_kv"}
"""Public configuration field -> field of this."""


def heuristic(record: TiledAttention, device: Any, direction: Direction) -> ChunkedSoftmax:
    """Returns tile sizes for a record on a device, not measured.

    Half as many keys in a band: tiles that it only touches at a corner are what it costs beyond its own size.
    """
    if record.pattern is not None:
        return _clamped_blocks(record, DEFAULT_PATTERN_BLOCK, DEFAULT_PATTERN_BLOCK)
    return _clamped_blocks(
        record, DEFAULT_BLOCK, DEFAULT_BLOCK if None in causal_window_bounds(record) else DEFAULT_BLOCK // 2
    )


def candidates(record: TiledAttention, device: Any, direction: Direction) -> tuple[ChunkedSoftmax, ...]:
    """Returns tile sizes worth measuring for a record on a device."""
    small = () if record.pattern is None else ((64, 64), (128, 128))
    pairs = (*small, (256, 256), (256, 512), (512, 256), (512, 512), (512, 1024), (1024, 512), (1024, 1024))
    return tuple(dict.fromkeys(_clamped_blocks(record, *pair) for pair in pairs))


def _clamped_blocks(record: TiledAttention, queries: int, keys: int) -> ChunkedSoftmax:
    """Returns sizes clamped to the lengths. The query heads of a KV head share a tile: many of them leave few queries
    each.
    """
    (_, length, heads, _), (_, key_length, kv_heads, _) = record.query.shape, record.key.shape
    # A tile has queries * group rows: its scores stay at SCORES_PER_STEP, down to 64 queries.
    shared = max(64, SCORES_PER_STEP * kv_heads // (heads * keys))
    return ChunkedSoftmax(block_q=_clamp_block(min(queries, shared), length), block_kv=_clamp_block(keys, key_length))


def _clamp_block(block: int, length: Any) -> int:
    """Returns the block size, at most `length`. A symbolic length does not limit it."""
    return max(1, min(block, length)) if isinstance(length, int) else block
