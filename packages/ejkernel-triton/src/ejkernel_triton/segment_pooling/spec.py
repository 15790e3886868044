"""What the segment pooling kernels are compiled for."""

import dataclasses
from typing import Any

from ejkernel.families.segment_pooling import SegmentPooling
from ejkernel_triton.launch import interpreting
from ejkernel_triton.segment_pooling.config import PoolingBackward, PoolingForward
from ejkernel_triton.sizes import ceil_div

AT_ONCE = 8
"""Sums of a pool that the second kernel loads together."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolingSpec:
    """Constants that all kernels share.

    Attributes:
        T: Tokens.
        C: Channels of a token, with those of all heads.
        M: Pools.
        CHUNK: Tokens of a pool, where all have equally many.
        RANGES: Whether each pool has a range of its own.
        LENGTHS: Whether rows end before their last token.
        STEP: The largest power of two up to M, with which a search begins.
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
        SPAN: Tokens of a block.
        BLOCKS: Blocks of a row.
        BLOCK_T: Tokens that are loaded together.
        BLOCK_C: Channels of a program.
        TILES: Programs that share the channels.
        AT_ONCE: Sums that the second kernel loads together.
        WIDE: Channels of its programs: most find that there is nothing to do, so they are few.
        WIDE_TILES: Programs that share the channels there.
        WAYS: Pools that a step of the search for a block's pools looks at.
        WIDE_LEVELS: Steps of that search.
        PREFETCH: Whether a tile is loaded while the one before is added.
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
        BLOCK_T: Tokens of a program.
        BLOCKS: Programs that share the tokens.
        BLOCK_C: Channels that are written together.
        STEPS: Tiles of channels of a program.
        GROUPS: Programs that share the channels.
    """

    BLOCK_T: int
    BLOCKS: int
    BLOCK_C: int
    STEPS: int
    GROUPS: int


def _shared(record: SegmentPooling) -> dict[str, Any]:
    _, tokens, heads, size = record.values.shape
    pools = ceil_div(tokens, record.chunk_size) if record.ranges is None else record.ranges.shape[0]
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
    ways = 4 if interpreting() else 128  # interpreted tests have few pools, and are to take several steps
    wide = min(1 << (channels - 1).bit_length(), 64 if interpreting() else 512)
    return ForwardSpec(
        **shared,
        SPAN=config.span,
        BLOCKS=ceil_div(shared["T"], config.span),
        BLOCK_T=config.block_t,
        BLOCK_C=config.block_c,
        TILES=ceil_div(channels, config.block_c),
        AT_ONCE=AT_ONCE,
        WIDE=wide,
        WIDE_TILES=ceil_div(channels, wide),
        WAYS=ways,
        WIDE_LEVELS=next(n for n in range(1, 33) if ways**n >= shared["M"]),
        PREFETCH=config.prefetch,
    )


def backward_spec(record: SegmentPooling, config: PoolingBackward) -> BackwardSpec:
    """Returns the constants of a record's backward kernel."""
    shared = _shared(record)
    tiles = ceil_div(shared["C"], config.block_c)
    steps = min(config.tiles, tiles)
    return BackwardSpec(
        **shared,
        BLOCK_T=config.block_t,
        BLOCKS=ceil_div(shared["T"], config.block_t),
        BLOCK_C=config.block_c,
        STEPS=steps,
        GROUPS=ceil_div(tiles, steps),
    )
