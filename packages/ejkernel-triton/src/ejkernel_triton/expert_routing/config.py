"""Configuration of the routing kernels."""

import dataclasses

from ejkernel.families.expert_routing import FAMILY, ExpertRouting
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.params import Direction
from ejkernel.planning.fixed_sizes import with_fixed_sizes
from ejkernel_triton.launch import is_interpreting
from ejkernel_triton.sizes import pad_to_power_of_two, require_powers_of_two

LOGITS_PER_THREAD = 32
"""Logits per thread: with 64 the kernel spills on an H200."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoutingTiles:
    """Configuration of the kernels.

    Attributes:
        block_t: Tokens per program; a power of two.
        num_warps: Warps per program.
    """

    block_t: int
    num_warps: int

    def __post_init__(self) -> None:
        require_powers_of_two(self, "block_t", "num_warps")


PUBLIC_FIELDS = {"block_t": "block_t", "num_warps": "num_warps"}
"""Maps fields of the public configuration to fields of this one."""


def heuristic(record: ExpertRouting, device: DeviceInfo, direction: Direction) -> RoutingTiles:
    """Returns the default tiles for a record on a device: as many tokens as registers can hold logits of."""
    if is_interpreting():
        return RoutingTiles(block_t=16, num_warps=1)
    warps, warp_size = 4, 64 if device.vendor == "amd" else 32
    block_t = warps * warp_size * LOGITS_PER_THREAD // pad_to_power_of_two(record.logits.shape[1])
    return RoutingTiles(block_t=max(1, min(64, block_t, pad_to_power_of_two(record.logits.shape[0]))), num_warps=warps)


FIXED_TOKENS = 64
"""Tokens of the call whose configuration serves all calls in a `batch_invariant` block."""


def batch_invariant(record: ExpertRouting, device: DeviceInfo, direction: Direction) -> RoutingTiles:
    """Returns the tiles for all calls in a `batch_invariant` block."""
    return heuristic(with_fixed_sizes(record, FAMILY.axes_of(record), {"t": FIXED_TOKENS}), device, direction)


def candidates(record: ExpertRouting, device: DeviceInfo, direction: Direction) -> tuple[RoutingTiles, ...]:
    """Returns tiles worth measuring for a record on a device."""
    default = heuristic(record, device, direction)
    return default, dataclasses.replace(default, block_t=max(1, default.block_t // 2))
