"""Configurations of the selective-scan kernels."""

import dataclasses
from typing import Any

from ejkernel.arithmetic import cdiv
from ejkernel.families.selective_scan import FAMILY, TOKENS_PER_STORED_STATE, SelectiveScan
from ejkernel.ops.chips import gpu_of
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.params import Direction
from ejkernel.planning.fixed_sizes import with_fixed_sizes
from ejkernel_triton.launch import is_interpreting


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScanForward:
    """Configuration of the forward scan.

    Attributes:
        block_e: Channels per program; with fewer than lanes, several lanes share the state of a channel.
        block_t: Tokens per load, a divisor of the interval.
        splits: Segments of the sequence that are scanned in parallel; more than one costs another pass.
        num_warps: Warps per program.
        bc_prefetch_distance: Tokens between the load of B and C and their use, at most `block_t`; each takes 2
            registers per state element. 0 leaves the distance to the compiler.
    """

    block_e: int
    block_t: int
    splits: int
    num_warps: int
    bc_prefetch_distance: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScanBackward:
    """Configuration of the backward scan, whose programs are one warp.

    Attributes:
        block_e: Channels per program.
        block_t: Tokens whose states stay in registers.
        splits: Segments of the sequence that are scanned in parallel; more than one costs another pass.
        prefetch: Whether a block's tokens are loaded during the computation of the previous block; it takes registers.
        prefetch_states: Whether the states before a block are prefetched too, from the program's scratch.
        prefetch_recomputed_b: Whether B of a block is prefetched by one block where states are recomputed.
    """

    block_e: int
    block_t: int
    splits: int
    prefetch: bool
    prefetch_states: bool
    prefetch_recomputed_b: bool


PUBLIC_FIELDS = {"block_d": "block_e", "num_warps": "num_warps"}
"""Maps fields of the public configuration to fields of this one."""

MIN_BUSY_WARPS_PER_SM = 4
"""With fewer warps per multiprocessor than this its schedulers idle, and the sequence is split."""


def heuristic(record: SelectiveScan, device: DeviceInfo, direction: Direction) -> ScanForward | ScanBackward:
    """Returns the default tiles for a record on a device: one warp, in which every lane has a channel."""
    block_e = 64 if device.vendor == "amd" else 32
    splits = _num_segments(record, device, block_e)
    state_dim = 1 << (record.decay.shape[1] - 1).bit_length()
    if direction == "backward":
        # A thread has 255 registers, for five tiles of states in addition to those of a block.
        # Measured on an H200 with N 16 (docs/lab/selective_scan_gpu.md): blocks of 4 tokens 4.24 ms, of 2 tokens 5.66.
        block_t = 1 if state_dim > 16 else 2 if is_interpreting() or gpu_of(device).architecture == "ampere" else 4
        return ScanBackward(
            block_e=block_e,
            block_t=block_t,
            splits=splits,
            prefetch=is_interpreting(),
            prefetch_states=False,
            prefetch_recomputed_b=False,
        )
    # One warp and blocks of 16 tokens 2.85 ms, two warps 2.96, four 3.10; two segments 4.1 where one fills the chip.
    block_t, prefetch_tokens = 4 if is_interpreting() or state_dim > 16 else 16, 0
    # Measured on an H200 with N 16: 1.11 ms with columns prefetched by 3 tokens, instead of 3.11 ms without prefetch,
    # where every load waits. Wider columns leave too few registers for the prefetch.
    if gpu_of(device).architecture == "hopper" and state_dim <= 16 and record.write.dtype.itemsize == 2:
        # Masked loads of a last, partial block take registers as well: longer blocks with masks would spill. Each
        # packed sequence has such a block.
        has_masked_loads = record.cu_seqlens is not None or record.x.shape[1] % 8 > 0
        block_t, prefetch_tokens = 4 if is_interpreting() or has_masked_loads else 8, 3
    return ScanForward(
        block_e=block_e, block_t=block_t, splits=splits, num_warps=1, bc_prefetch_distance=prefetch_tokens
    )


def batch_invariant(record: SelectiveScan, device: DeviceInfo, direction: Direction) -> ScanForward | ScanBackward:
    """Returns the tiles for all calls in a `batch_invariant` block: those of one token, which is not split."""
    return heuristic(with_fixed_sizes(record, FAMILY.axes_of(record), {"t": 1}), device, direction)


def candidates(
    record: SelectiveScan, device: DeviceInfo, direction: Direction
) -> tuple[ScanForward | ScanBackward, ...]:
    """Returns tiles worth measuring for a record on a device."""
    default = heuristic(record, device, direction)
    splits = (default.splits,) if record.cu_seqlens is not None else (default.splits, 2 * default.splits)
    configs: list[Any] = [dataclasses.replace(default, splits=n) for n in splits]
    if isinstance(default, ScanForward):
        configs += _configs_without_prefetch(default) + _configs_with_prefetch(default, record.decay.shape[1])
        return tuple(dict.fromkeys(configs))
    tile_fields = ((default.block_e // 2, 2), (default.block_e, 2))
    configs += [dataclasses.replace(default, block_e=e, block_t=t) for e, t in tile_fields]
    configs.append(dataclasses.replace(default, block_t=min(2, default.block_t), prefetch=True, prefetch_states=True))
    configs.append(dataclasses.replace(default, prefetch_recomputed_b=True))
    return tuple(dict.fromkeys(configs))


def _configs_without_prefetch(default_config: ScanForward) -> list[ScanForward]:
    """Returns forward tiles that leave the placement of the columns' loads to the compiler."""
    e = default_config.block_e
    tile_fields = ((e, 16), (e // 2, 16), (e, 8))
    return [dataclasses.replace(default_config, block_e=e, block_t=t, bc_prefetch_distance=0) for e, t in tile_fields]


def _configs_with_prefetch(default_config: ScanForward, state_dim: int) -> list[ScanForward]:
    """Returns forward tiles with prefetched columns: as far as registers allow and less, and with two lanes per
    channel.

    Two lanes per channel have half of its state each, and half of the registers: 128 of N 16 with 3 tokens prefetched,
    as many as 16 warps per multiprocessor have.
    """
    e, max_prefetch = default_config.block_e, 4 if state_dim <= 16 else 2
    tile_fields = (
        (e, 8, max_prefetch),
        (e, 8, max_prefetch - 1),
        (e, 16, max_prefetch - 1),
        (e, 4, max_prefetch - 1),
        (e // 2, 8, max_prefetch - 1),
    )
    return [
        dataclasses.replace(default_config, block_e=e, block_t=t, bc_prefetch_distance=n) for e, t, n in tile_fields
    ]


def _num_segments(record: SelectiveScan, device: DeviceInfo, block_e: int) -> int:
    """Returns the number of segments that fills the chip, none shorter than four intervals."""
    rows, tokens, channels = record.x.shape
    if record.cu_seqlens is not None:
        return 1  # packed sequences are scanned in parallel anyway
    warps = max(1, rows * cdiv(channels, block_e))
    chunks = cdiv(tokens, TOKENS_PER_STORED_STATE)
    if is_interpreting():
        return min(2, chunks)
    min_warps = MIN_BUSY_WARPS_PER_SM * gpu_of(device).multiprocessors
    return max(1, min(cdiv(min_warps, warps) if warps < min_warps else 1, chunks // 4))
