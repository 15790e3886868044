"""The compile-time constants of the segment pooling kernels."""

import dataclasses
from typing import Any

from ejkernel.arithmetic import cdiv
from ejkernel.families.segment_pooling import SegmentPooling
from ejkernel_triton.launch import is_interpreting
from ejkernel_triton.segment_pooling.config import PoolingBackward, PoolingForward

SUMS_PER_LOAD = 8
"""Sums of a pool that the second kernel loads at a time."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolingSpec:
    """Constants that all kernels share.

    Attributes:
        T: Tokens.
        C: Channels per token, over all heads.
        M: Pools.
        CHUNK_SIZE: Tokens per pool, if all have the same number.
        HAS_RANGES: Whether pools are ranges of an array.
        HAS_LENGTHS: Whether rows have lengths of their own.
        FIRST_SEARCH_STEP: The largest power of two up to M, the first step of a search.
        NUM_BINARY_SEARCH_STEPS: Steps of a search.
    """

    T: int
    C: int
    M: int
    CHUNK_SIZE: int
    HAS_RANGES: bool
    HAS_LENGTHS: bool
    FIRST_SEARCH_STEP: int
    NUM_BINARY_SEARCH_STEPS: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForwardSpec(PoolingSpec):
    """Constants of the forward kernels.

    Attributes:
        TOKENS_PER_BLOCK: Tokens per block.
        NUM_BLOCKS: Blocks per row.
        BLOCK_T: Tokens per load.
        BLOCK_C: Channels per program.
        NUM_CHANNEL_TILES: Programs that share the channels.
        SUMS_PER_LOAD: Sums that the second kernel loads at a time.
        COMBINE_BLOCK_C: Channels per program of the second kernel; large, since most programs have nothing to do.
        NUM_COMBINE_CHANNEL_TILES: Its programs that share the channels.
        POOLS_PER_SEARCH_STEP: Pools that a step of the search for a block's pools compares.
        NUM_BLOCK_SEARCH_STEPS: Steps of that search.
        PREFETCHES_TILES: Whether the next tile is loaded while the current one is added.
    """

    TOKENS_PER_BLOCK: int
    NUM_BLOCKS: int
    BLOCK_T: int
    BLOCK_C: int
    NUM_CHANNEL_TILES: int
    SUMS_PER_LOAD: int
    COMBINE_BLOCK_C: int
    NUM_COMBINE_CHANNEL_TILES: int
    POOLS_PER_SEARCH_STEP: int
    NUM_BLOCK_SEARCH_STEPS: int
    PREFETCHES_TILES: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackwardSpec(PoolingSpec):
    """Constants of the backward kernel.

    Attributes:
        BLOCK_T: Tokens per program.
        NUM_BLOCKS: Programs that share the tokens.
        BLOCK_C: Channels per store.
        TILES_PER_PROGRAM: Tiles of channels per program.
        NUM_CHANNEL_PROGRAMS: Programs that share the channels.
    """

    BLOCK_T: int
    NUM_BLOCKS: int
    BLOCK_C: int
    TILES_PER_PROGRAM: int
    NUM_CHANNEL_PROGRAMS: int


def _shared_constants(record: SegmentPooling) -> dict[str, Any]:
    _, tokens, heads, head_dim = record.values.shape
    pools = cdiv(tokens, record.chunk_size) if record.ranges is None else record.ranges.shape[0]
    search_steps = pools.bit_length()
    return {
        "T": tokens,
        "C": heads * head_dim,
        "M": pools,
        "CHUNK_SIZE": record.chunk_size,
        "HAS_RANGES": record.ranges is not None,
        "HAS_LENGTHS": record.lengths is not None,
        "FIRST_SEARCH_STEP": 1 << (search_steps - 1),
        "NUM_BINARY_SEARCH_STEPS": search_steps,
    }


def make_forward_spec(record: SegmentPooling, config: PoolingForward) -> ForwardSpec:
    """Returns the constants of a record's forward kernels."""
    shared_constants = _shared_constants(record)
    channels = shared_constants["C"]
    pools_per_search_step = (
        4 if is_interpreting() else 128
    )  # interpreted tests have few pools, and should take several steps
    combine_block_c = min(1 << (channels - 1).bit_length(), 64 if is_interpreting() else 512)
    return ForwardSpec(
        **shared_constants,
        TOKENS_PER_BLOCK=config.tokens_per_block,
        NUM_BLOCKS=cdiv(shared_constants["T"], config.tokens_per_block),
        BLOCK_T=config.block_t,
        BLOCK_C=config.block_c,
        NUM_CHANNEL_TILES=cdiv(channels, config.block_c),
        SUMS_PER_LOAD=SUMS_PER_LOAD,
        COMBINE_BLOCK_C=combine_block_c,
        NUM_COMBINE_CHANNEL_TILES=cdiv(channels, combine_block_c),
        POOLS_PER_SEARCH_STEP=pools_per_search_step,
        NUM_BLOCK_SEARCH_STEPS=next(n for n in range(1, 33) if pools_per_search_step**n >= shared_constants["M"]),
        PREFETCHES_TILES=config.prefetch,
    )


def make_backward_spec(record: SegmentPooling, config: PoolingBackward) -> BackwardSpec:
    """Returns the constants of a record's backward kernel."""
    shared_constants = _shared_constants(record)
    tiles = cdiv(shared_constants["C"], config.block_c)
    steps = min(config.tiles_per_program, tiles)
    return BackwardSpec(
        **shared_constants,
        BLOCK_T=config.block_t,
        NUM_BLOCKS=cdiv(shared_constants["T"], config.block_t),
        BLOCK_C=config.block_c,
        TILES_PER_PROGRAM=steps,
        NUM_CHANNEL_PROGRAMS=cdiv(tiles, steps),
    )
