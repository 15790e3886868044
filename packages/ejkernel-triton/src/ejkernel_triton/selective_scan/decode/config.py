"""Tiles of the selective scan's decode step."""

import dataclasses

from ejkernel.arithmetic import cdiv
from ejkernel.families.selective_scan import SelectiveScan
from ejkernel.ops.chips import gpu_of
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.params import Direction
from ejkernel_triton.launch import is_interpreting
from ejkernel_triton.sizes import pad_to_power_of_two, require_powers_of_two

STATE_ELEMENTS_PER_THREAD = 16
"""State elements per thread, and as many of A."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScanDecodeTile:
    """Configuration of the decode step.

    Attributes:
        block_e: Channels per program; a power of two.
        num_warps: Warps per program.
    """

    block_e: int
    num_warps: int

    def __post_init__(self) -> None:
        require_powers_of_two(self, "block_e")


PUBLIC_FIELDS = {"block_d": "block_e", "num_warps": "num_warps"}
"""Maps fields of the public configuration to fields of this one."""


def num_sequences(record: SelectiveScan) -> int:
    """Returns the number of rows, or of packed sequences."""
    return record.x.shape[0] if record.cu_seqlens is None else record.cu_seqlens.shape[0] - 1


def heuristic(record: SelectiveScan, device: DeviceInfo, direction: Direction) -> ScanDecodeTile:
    """Returns the default tile for a record on a device, not measured."""
    if is_interpreting():
        return ScanDecodeTile(block_e=16, num_warps=1)
    warp_size, state_elements = 64 if device.vendor == "amd" else 32, pad_to_power_of_two(record.decay.shape[1])
    block, programs = max(1, 4 * STATE_ELEMENTS_PER_THREAD * warp_size // state_elements), num_sequences(record)
    block = min(block, pad_to_power_of_two(record.x.shape[2]))
    # Few states are split more finely, to reach every multiprocessor.
    while (
        block * state_elements > 16 * warp_size
        and programs * cdiv(record.x.shape[2], block) < gpu_of(device).multiprocessors
    ):
        block //= 2
    return _make_tile(block, state_elements, warp_size)


def _make_tile(block: int, state_elements: int, warp_size: int) -> ScanDecodeTile:
    return ScanDecodeTile(
        block_e=block, num_warps=max(1, min(8, block * state_elements // (STATE_ELEMENTS_PER_THREAD * warp_size)))
    )


def candidates(record: SelectiveScan, device: DeviceInfo, direction: Direction) -> tuple[ScanDecodeTile, ...]:
    """Returns tiles worth measuring for a record on a device."""
    first = heuristic(record, device, direction)
    if is_interpreting():
        return (first, ScanDecodeTile(block_e=4, num_warps=1))
    sizes = [max(1, first.block_e * n // 4) for n in (1, 2, 4, 8)]
    configs = [ScanDecodeTile(block_e=n, num_warps=max(1, first.num_warps * n // first.block_e)) for n in sizes]
    configs += [dataclasses.replace(x, num_warps=2 * x.num_warps) for x in configs if x.num_warps < 8]
    return tuple(dict.fromkeys((first, *configs)))
