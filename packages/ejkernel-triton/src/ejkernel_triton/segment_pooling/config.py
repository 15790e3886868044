"""Configurations of the segment pooling kernels."""

import dataclasses
from typing import Any

from ejkernel.arithmetic import cdiv
from ejkernel.families.segment_pooling import SegmentPooling
from ejkernel.ops.chips import gpu_of
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.params import Direction
from ejkernel_triton.launch import is_interpreting
from ejkernel_triton.sizes import pad_to_power_of_two

RESIDENT_PROGRAMS_PER_SM = {True: 12, False: 21}
"""Programs of one warp that fit a multiprocessor, by whether they prefetch a tile."""

MAX_TOKENS_PER_BLOCK = 1024
"""Tokens per block from which on a second wave of programs has no measurable cost."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolingForward:
    """Configuration of the forward pass.

    Attributes:
        tokens_per_block: Tokens per block; a program sums the block's pools, and pools of several blocks take a second
            kernel.
        block_t: Tokens per load; a power of two.
        block_c: Channels per program; a power of two.
        num_warps: Warps per program.
        prefetch: Whether the next tile of tokens is loaded while the current one is added; it takes registers.
    """

    tokens_per_block: int
    block_t: int
    block_c: int
    num_warps: int
    prefetch: bool

    def __post_init__(self) -> None:
        _check_powers_of_two(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolingBackward:
    """Configuration of the backward kernel.

    Attributes:
        block_t: Tokens per program, whose pools are looked up together; a power of two.
        block_c: Channels per store; a power of two.
        tiles_per_program: Tiles of `block_c` channels per program.
        num_warps: Warps per program.
    """

    block_t: int
    block_c: int
    tiles_per_program: int
    num_warps: int

    def __post_init__(self) -> None:
        _check_powers_of_two(self)


PUBLIC_FIELDS = {"block_size": "block_t", "block_dim": "block_c", "num_warps": "num_warps"}
"""Maps fields of the public configuration to fields of this one."""


def heuristic(record: SegmentPooling, device: DeviceInfo, direction: Direction) -> PoolingForward | PoolingBackward:
    """Returns the default tiles for a record on a device: a warp loads 16 bytes per thread of one token's channels."""
    rows, tokens, heads, head_dim = record.values.shape
    channels, warp_size = heads * head_dim, 64 if device.vendor == "amd" else 32
    block_c = max(16, min(pad_to_power_of_two(channels), warp_size * 16 // record.values.dtype.itemsize))
    if direction == "backward":
        block_t = 4 if is_interpreting() else min(16, pad_to_power_of_two(tokens))
        return PoolingBackward(block_t=block_t, block_c=block_c, tiles_per_program=4, num_warps=4)
    # Short pools are loops of few steps, with nothing to prefetch.
    has_long_pools = _average_pool_length(record) >= 64
    block_t = 8 if is_interpreting() else min(8, pad_to_power_of_two(tokens))
    tokens_per_block = (
        32
        if is_interpreting()
        else _tokens_per_block(rows * cdiv(channels, block_c), tokens, device, RESIDENT_PROGRAMS_PER_SM[has_long_pools])
    )
    # Blocks are whole chunks, if chunks have equal lengths: then no pool crosses blocks.
    if record.ranges is None and record.chunk_size <= tokens_per_block:
        tokens_per_block -= tokens_per_block % record.chunk_size
    # Measured on an H200, 64 documents of about 1024 tokens: 0.0763 ms; two warps, 16 tokens and no prefetch 0.0787 in
    # one wave and 0.0837 in two. Pools of 32 tokens: 0.0928 ms, two warps and blocks of 256 tokens 0.1137.
    return PoolingForward(
        tokens_per_block=tokens_per_block, block_t=block_t, block_c=block_c, num_warps=1, prefetch=has_long_pools
    )


FIXED_BLOCK_TOKENS = 256
"""Tokens per block of calls in a `batch_invariant` block, whose pools are not longer."""


def batch_invariant(
    record: SegmentPooling, device: DeviceInfo, direction: Direction
) -> PoolingForward | PoolingBackward:
    """Returns the tiles for all calls in a `batch_invariant` block, in which no pool crosses blocks of tokens."""
    tiles = heuristic(record, device, direction)
    if isinstance(tiles, PoolingBackward):
        return tiles
    pools_per_block = max(1, FIXED_BLOCK_TOKENS // record.chunk_size)
    return dataclasses.replace(
        tiles,
        tokens_per_block=pools_per_block * record.chunk_size,
        block_t=min(8, pad_to_power_of_two(record.chunk_size)),
    )


def _tokens_per_block(programs_per_block: int, tokens: int, device: DeviceInfo, programs_per_sm: int) -> int:
    """Returns the tokens per block that fill one wave of programs, or several equal ones.

    Args:
        programs_per_block: Number of programs per block of tokens, over all rows.
        tokens: Tokens per row.
        device: The device, whose multiprocessors they fill.
        programs_per_sm: Resident programs per multiprocessor.
    """
    programs_per_sm *= gpu_of(device).multiprocessors
    # All programs of a wave wait for their pools first, and for their last tokens: fewer waves wait less often.
    waves = max(1, cdiv(tokens * programs_per_block, MAX_TOKENS_PER_BLOCK * programs_per_sm))
    blocks = max(1, waves * programs_per_sm // programs_per_block)
    return max(32, 8 * cdiv(tokens, 8 * blocks))


def candidates(
    record: SegmentPooling, device: DeviceInfo, direction: Direction
) -> tuple[PoolingForward | PoolingBackward, ...]:
    """Returns tiles worth measuring for a record on a device."""
    default = heuristic(record, device, direction)
    if is_interpreting():
        other = dataclasses.replace(default, block_t=4)
        return (default, dataclasses.replace(other, prefetch=True) if isinstance(other, PoolingForward) else other)
    configs: list[Any] = [dataclasses.replace(default, num_warps=n) for n in (1, 2, 4, 8)]
    if isinstance(default, PoolingForward):
        # One warp has too few registers for larger tiles, and for two warps they bring less.
        two_warp_config = dataclasses.replace(default, num_warps=2, prefetch=False)
        configs += [
            dataclasses.replace(two_warp_config, block_t=t, tokens_per_block=n * default.tokens_per_block)
            for t, n in ((8, 1), (16, 1), (32, 3))
        ]
        configs += [dataclasses.replace(two_warp_config, block_c=2 * default.block_c)]
        configs += [dataclasses.replace(default, tokens_per_block=n * default.tokens_per_block) for n in (2, 3)]
        configs += [
            dataclasses.replace(default, tokens_per_block=default.tokens_per_block // n)
            for n in (2, 3)
            if default.tokens_per_block >= 32 * n
        ]
        configs += [dataclasses.replace(default, prefetch=not default.prefetch)]
    else:
        configs += [dataclasses.replace(default, block_t=n) for n in (8, 16, 32)]
        configs += [dataclasses.replace(default, block_c=2 * default.block_c)]
        configs += [dataclasses.replace(default, tiles_per_program=n) for n in (1, 2, 8)]
    return tuple(dict.fromkeys((default, *configs)))


def _check_powers_of_two(config: Any) -> None:
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name != "prefetch" and (value < 1 or (field.name.startswith("block_") and value & (value - 1))):
            raise ValueError(f"{field.name}: got {value}, wants at least 1, and a power of two of a block")


def _average_pool_length(record: SegmentPooling) -> int:
    """Returns the approximate number of tokens per pool."""
    if record.ranges is None:
        return record.chunk_size
    return record.values.shape[1] // record.ranges.shape[0]
