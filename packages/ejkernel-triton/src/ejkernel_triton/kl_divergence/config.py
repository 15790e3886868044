"""Configurations of the divergence kernels."""

import dataclasses

from ejkernel.families.kl_divergence import FAMILY, KLDivergence
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.params import Direction
from ejkernel.planning.fixed_sizes import with_fixed_sizes
from ejkernel_triton.cross_entropy.config import tile_of_entries
from ejkernel_triton.launch import is_interpreting
from ejkernel_triton.sizes import pad_to_power_of_two, require_powers_of_two


@dataclasses.dataclass(frozen=True, kw_only=True)
class DivergenceTiles:
    """Configuration of both passes.

    Attributes:
        block_v: Entries of the vocabulary that a program loads at a time, of student and teacher; a power of two.
        num_warps: Warps per program.
    """

    block_v: int
    num_warps: int

    def __post_init__(self) -> None:
        require_powers_of_two(self, "block_v", "num_warps")


PUBLIC_FIELDS = {"num_warps": "num_warps"}
"""Maps fields of the public configuration to fields of this one."""


def heuristic(record: KLDivergence, device: DeviceInfo, direction: Direction) -> DivergenceTiles:
    """Returns the default tile for a record on a device."""
    entries, itemsize = record.student.shape[1], max(record.student.dtype.itemsize, record.teacher.dtype.itemsize)
    if is_interpreting():
        return DivergenceTiles(block_v=min(32, pad_to_power_of_two(entries)), num_warps=1)
    block_v, num_warps = tile_of_entries(entries, itemsize, device)
    # Two arrays take the registers of one tile.
    return DivergenceTiles(block_v=max(1, block_v // 2), num_warps=num_warps)


def batch_invariant(record: KLDivergence, device: DeviceInfo, direction: Direction) -> DivergenceTiles:
    """Returns the tile for all calls in a `batch_invariant` block."""
    return heuristic(with_fixed_sizes(record, FAMILY.axes_of(record), {"t": 1}), device, direction)


def candidates(record: KLDivergence, device: DeviceInfo, direction: Direction) -> tuple[DivergenceTiles, ...]:
    """Returns tiles worth measuring for a record on a device."""
    default = heuristic(record, device, direction)
    configs = [dataclasses.replace(default, num_warps=2 * default.num_warps)]
    configs += [dataclasses.replace(default, block_v=2 * default.block_v, num_warps=2 * default.num_warps)]
    configs += [dataclasses.replace(default, block_v=2 * default.block_v)]
    return tuple(dict.fromkeys((default, *configs)))
