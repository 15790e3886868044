"""Configurations of the selective-scan kernels."""

import dataclasses
from typing import Any

from ejkernel.families.selective_scan import INTERVAL, SelectiveScan
from ejkernel.ops.config.params import Direction
from ejkernel.ops.device import DeviceInfo
from ejkernel_triton.chips import chip_of
from ejkernel_triton.launch import interpreting


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScanForward:
    """Configuration of the forward walk.

    Attributes:
        block_e: Channels of a program; a lane of a warp has one where there are 32 (AMD: 64) a warp.
        block_t: Tokens that are loaded together, a divisor of the interval.
        splits: Parts of the sequence that are walked at the same time; more than one costs a pass more.
        num_warps: Warps a program.
    """

    block_e: int
    block_t: int
    splits: int
    num_warps: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScanBackward:
    """Configuration of the backward walk, whose programs are one warp.

    Attributes:
        block_e: Channels of a program.
        block_t: Tokens whose states are held in registers.
        splits: Parts of the sequence that are walked at the same time; more than one costs a pass more.
        prefetch: Whether a block's tokens are loaded while the one before is worked on, which takes registers.
    """

    block_e: int
    block_t: int
    splits: int
    prefetch: bool


FACES = {"block_d": "block_e", "num_warps": "num_warps"}
"""Fields of the public configuration and what they set here."""

WARPS_PER_SM = 4
"""Fewer warps a multiprocessor than this leave its schedulers idle, and the sequence is split."""


def heuristic(record: SelectiveScan, device: DeviceInfo, direction: Direction) -> ScanForward | ScanBackward:
    """Tiles for a record on a device, by rule."""
    lanes = 64 if device.vendor == "amd" else 32
    splits = _splits(record, device, lanes)
    size = 1 << (record.decay.shape[1] - 1).bit_length()
    if direction == "backward":
        # A thread has 255 registers, and five tiles of states beside those it holds for a block.
        held = 1 if size > 16 else 2 if interpreting() or chip_of(device).architecture == "ampere" else 4
        return ScanBackward(block_e=lanes, block_t=held, splits=splits, prefetch=interpreting())
    warps = 1 if record.x.shape[2] <= lanes or interpreting() else 4
    block_t = 4 if interpreting() else max(2, min(16, 256 // size))
    return ScanForward(block_e=lanes * warps, block_t=block_t, splits=splits, num_warps=warps)


def candidates(
    record: SelectiveScan, device: DeviceInfo, direction: Direction
) -> tuple[ScanForward | ScanBackward, ...]:
    """Tiles worth measuring for a record on a device."""
    first = heuristic(record, device, direction)
    found: list[Any] = [dataclasses.replace(first, splits=n) for n in (first.splits, 2 * first.splits)]
    if isinstance(first, ScanBackward):
        found += [dataclasses.replace(first, block_t=n) for n in (2, 4)]
        found += [dataclasses.replace(first, prefetch=not first.prefetch)]
    else:
        lanes = first.block_e // first.num_warps
        shapes = ((1, 8), (1, 16), (2, 8), (4, 8), (4, 16))
        found += [dataclasses.replace(first, block_e=lanes * n, num_warps=n, block_t=t) for n, t in shapes]
    return tuple(dict.fromkeys(found))


def _splits(record: SelectiveScan, device: DeviceInfo, lanes: int) -> int:
    """As many parts as fill the chip; none shorter than four intervals."""
    rows, tokens, channels = record.x.shape
    warps = max(1, rows * -(-channels // lanes))
    chunks = -(-tokens // INTERVAL)
    if interpreting():
        return min(2, chunks)
    wanted = WARPS_PER_SM * chip_of(device).multiprocessors
    return max(1, min(-(-wanted // warps) if warps < wanted else 1, chunks // 4))
