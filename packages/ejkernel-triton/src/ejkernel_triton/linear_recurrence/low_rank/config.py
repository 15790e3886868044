"""Chunks, tiles and launch parameters of recurrences with a low-rank term."""

import dataclasses

from ejkernel.families.linear_recurrence import LinearRecurrence, num_state_heads
from ejkernel.ops.chips import gpu_of
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.params import Direction
from ejkernel_triton.launch import is_interpreting
from ejkernel_triton.linear_recurrence.config import DEFAULT_WARPS, MIN_TILE
from ejkernel_triton.sizes import pad_to_power_of_two

MIN_CHUNK = 2 * MIN_TILE
"""Tokens of the shortest chunk on a device: with chunks of 16 tokens Triton 3.6 miscompiles products with gates per key
channel (see `ahead.miscompiled_shifts`)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LowRankConfig:
    """Configuration of both passes, which share the chunks.

    Attributes:
        chunk: Tokens per chunk; a power of two, and at least 32 on a device.
        chunk_warps: Warps per program of the kernels that have a program per chunk.
        scan_block_v: Value channels per program that passes states; at most all of them, padded to a power of two.
        scan_warps: Warps per program that passes states.
        scan_stages: Its pipeline stages.
    """

    chunk: int
    chunk_warps: int
    scan_block_v: int
    scan_warps: int
    scan_stages: int

    def __post_init__(self) -> None:
        for name in ("chunk", "scan_block_v"):
            value = getattr(self, name)
            if value < MIN_TILE or value & (value - 1):
                raise ValueError(f"{name}: got {value}, wants a power of two from {MIN_TILE} on")


PUBLIC_FIELDS = {"block_q": "chunk", "chunk_size": "chunk", "num_stages": "scan_stages"}
"""Maps fields of the public configurations to fields of this one."""


def heuristic(record: LinearRecurrence, device: DeviceInfo, direction: Direction) -> LowRankConfig:
    """Returns the default chunks and tiles of both passes for a record on a device."""
    if is_interpreting():
        return LowRankConfig(
            chunk=MIN_TILE, chunk_warps=DEFAULT_WARPS, scan_block_v=MIN_TILE, scan_warps=DEFAULT_WARPS, scan_stages=1
        )
    chip, is_float32 = gpu_of(device), record.query.dtype.itemsize > 2
    has_small_shared_memory = is_float32 or chip.shared_memory < 128 * 1024
    longest_chunk = 32 if has_small_shared_memory else 64
    num_scans = num_state_heads(record) * (
        record.query.shape[0] if record.cu_seqlens is None else record.cu_seqlens.shape[0] - 1
    )
    # A scan is sequential over its chunks, so fewer programs than multiprocessors leave some idle.
    value_dim = pad_to_power_of_two(record.value.shape[3], MIN_TILE)
    has_many_scans = 2 * num_scans >= chip.multiprocessors
    return LowRankConfig(
        chunk=max(MIN_CHUNK, min(longest_chunk, pad_to_power_of_two(record.query.shape[1], MIN_TILE))),
        chunk_warps=DEFAULT_WARPS,
        scan_block_v=min(value_dim, 32 if has_many_scans else MIN_TILE),
        scan_warps=DEFAULT_WARPS,
        scan_stages=2 if has_small_shared_memory else 3,
    )


def candidates(record: LinearRecurrence, device: DeviceInfo, direction: Direction) -> tuple[LowRankConfig, ...]:
    """Returns configurations of both passes worth measuring for a record on a device."""
    default = heuristic(record, device, direction)
    if is_interpreting():
        return (default, dataclasses.replace(default, chunk=2 * MIN_TILE, scan_block_v=2 * MIN_TILE))
    configs = [dataclasses.replace(default, scan_block_v=n) for n in (16, 32, 64) if n < 2 * record.value.shape[3]]
    configs += [dataclasses.replace(default, scan_stages=n) for n in (1, 2, 3)]
    return tuple(dict.fromkeys((default, *configs)))
