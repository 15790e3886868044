"""The compile-time constants of the segment pooling kernels."""

import dataclasses
from typing import Any

from ejkernel.arithmetic import cdiv
from ejkernel.families.segment_pooling import SegmentPooling
from ejkernel_triton.launch import interpreting
from ejkernel_triton.segment_pooling.config import PoolingBackward, PoolingForward

AT_ONCE = 8
"""Sums of a pool that the second kernel loads at a time."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolingSpec:
    """Constants that all kernels share.

    Attributes:
        T: Tokens.
        C: Channels per token, over all heads.
        M: Pools.
        CHUNK: Tokens per pool, if all have the same number.
        RANGES: Whether pools are ranges of an array.
        LENGTHS: Whether rows have lengths of their own.
        STEP: The largest power of two up to M, the first step of a search.
        LEVELS: Steps of a search.
    """

    T: int
    C: int
    M: int
    CHUNK: int
    RANGES: bool
    LENGTHS: bool
    STEP: int
    LEVELS: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForwardSpec(PoolingSpec):
    """Constants of the forward kernels.

    Attributes:
        SPAN: Tokens per block.
        BLOCKS: Blocks per row.
        BLOCK_T: Tokens per load.
        BLOCK_C: Channels per program.
        TILES: Programs that share the channels.
        AT_ONCE: Sums that the second kernel loads at a time.
        WIDE: Channels per program of the second kernel; large, since most programs have nothing to do.
        WIDE_TILES: Its programs that share the channels.
        WAYS: Pools that a step of the search for a block's pools compares.
        WIDE_LEVELS: Steps of that search.
        PREFETCH: Whether the next tile is loaded while the current one is added.
    """

    SPAN: int
    BLOCKS: int
    BLOCK_T: int
    BLOCK_C: int
    TILES: int
    AT_ONCE: int
    WIDE: int
    WIDE_TILES: int
    WAYS: int
    WIDE_LEVELS: int
    PREFETCH: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackwardSpec(PoolingSpec):
    """Constants of the backward kernel.

    Attributes:
        BLOCK_T: Tokens per program.
        BLOCKS: Programs that share the tokens.
        BLOCK_C: Channels per store.
        STEPS: Tiles of channels per program.
        GROUPS: Programs that share the channels.
    """

    BLOCK_T: int
    BLOCKS: int
    BLOCK_C: int
    STEPS: int
    GROUPS: int


def _shared(record: SegmentPooling) -> dict[str, Any]:
    _, tokens, heads, size = record.values.shape
    pools = cdiv(tokens, record.chunk_size) if record.ranges is None else record.ranges.shape[0]
    levels = pools.bit_length()
    return {
        "T": tokens,
        "C": heads * size,
        "M": pools,
        "CHUNK": record.chunk_size,
        "RANGES": record.ranges is not None,
        "LENGTHS": record.lengths is not None,
        "STEP": 1 << (levels - 1),
        "LEVELS": levels,
    }


def forward_spec(record: SegmentPooling, config: PoolingForward) -> ForwardSpec:
    """Returns the constants of a record's forward kernels."""
    shared = _shared(record)
    channels = shared["C"]
    ways = 4 if interpreting() else 128  # interpreted tests have few pools, and should take several steps
    wide = min(1 << (channels - 1).bit_length(), 64 if interpreting() else 512)
    return ForwardSpec(
        **shared,
        SPAN=config.span,
        BLOCKS=cdiv(shared["T"], config.span),
        BLOCK_T=config.block_t,
        BLOCK_C=config.block_c,
        TILES=cdiv(channels, config.block_c),
        AT_ONCE=AT_ONCE,
        WIDE=wide,
        WIDE_TILES=cdiv(channels, wide),
        WAYS=ways,
        WIDE_LEVELS=next(n for n in range(1, 33) if ways**n >= shared["M"]),
        PREFETCH=config.prefetch,
    )


def backward_spec(record: SegmentPooling, config: PoolingBackward) -> BackwardSpec:
    """Returns the constants of a record's backward kernel."""
    shared = _shared(record)
    tiles = cdiv(shared["C"], config.block_c)
    steps = min(config.tiles, tiles)
    return BackwardSpec(
        **shared,
        BLOCK_T=config.block_t,
        BLOCKS=cdiv(shared["T"], config.block_t),
        BLOCK_C=config.block_c,
        STEPS=steps,
        GROUPS=cdiv(tiles, steps),
    )
