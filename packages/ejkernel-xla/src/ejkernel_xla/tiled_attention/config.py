"""Tile sizes: the heuristic, and the candidates that are worth measuring."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from ejkernel.families.tiled_attention import TiledAttention, causal_window_bounds
from ejkernel.families.tiled_attention import invariance_limits as limits_of_family
from ejkernel.ops.params import Direction
from ejkernel_xla.sizes import check_positive
from ejkernel_xla.tiled_attention.plan import SCORES_PER_STEP

DEFAULT_BLOCK = 512
"""Long enough that matrix products dominate, short enough that a causal mask or a window leaves most tiles out."""


DEFAULT_PATTERN_BLOCK = 128
"""Smaller than BLOCK, since small tiles skip more of a pattern's gaps."""


DEFAULT_MASK_MOD_BLOCK = 256
"""Between the two: which tiles a `mask_mod` leaves is known only once it has been evaluated."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkedSoftmax:
    """The configuration of either pass.

    Attributes:
        block_q: Queries per tile.
        block_kv: Keys per tile.
        batch_invariant: Whether all tiles have these sizes and begin with their segment, whatever else the call has.
    """

    block_q: int
    block_kv: int
    batch_invariant: bool = False

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
    if record.mask_mod is not None:
        return _clamped_blocks(record, DEFAULT_MASK_MOD_BLOCK, DEFAULT_MASK_MOD_BLOCK)
    return _clamped_blocks(
        record, DEFAULT_BLOCK, DEFAULT_BLOCK if None in causal_window_bounds(record) else DEFAULT_BLOCK // 2
    )


FIXED_BLOCK_Q, FIXED_BLOCK_KV = 32, 256
"""Tile sizes in a `batch_invariant` block."""


def batch_invariant(record: TiledAttention, device: Any, direction: Direction) -> ChunkedSoftmax:
    """Returns tile sizes for all calls in a `batch_invariant` block.

    They are multiples of 16 rows: a CPU's matrix product computes the last rows of other sizes by other instructions.
    """
    return ChunkedSoftmax(block_q=FIXED_BLOCK_Q, block_kv=FIXED_BLOCK_KV, batch_invariant=True)


def invariance_limits(record: TiledAttention) -> Iterator[str]:
    """Yields why rows of a record depend on the rest of its call."""
    yield from limits_of_family(record)
    sizes: tuple[Any, ...] = (*record.query.shape, *record.key.shape)
    if not all(isinstance(size, int) for size in sizes):
        yield "symbolic sizes cannot be cut into fixed tiles"
    if record.q_segment_ids is not None and record.kv_segment_ids is not None:
        if record.relative_bias is not None:
            yield "relative_bias with segment ids: its distances are those of indices in the whole row"
        if not record.normalize_output:
            yield "normalize_output=False with segment ids: the index of the largest score is that in the whole row"


def candidates(record: TiledAttention, device: Any, direction: Direction) -> tuple[ChunkedSoftmax, ...]:
    """Returns tile sizes worth measuring for a record on a device."""
    small = () if record.pattern is None and record.mask_mod is None else ((64, 64), (128, 128))
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
