"""Tiles and launch parameters of a recurrence token by token.

No field follows the number of rows, sequences or tokens, so the rule is the same in `batch_invariant` blocks.
"""

import dataclasses

from ejkernel.families.linear_recurrence import LinearRecurrence
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.params import Direction
from ejkernel_triton.launch import is_interpreting
from ejkernel_triton.sizes import pad_to_power_of_two, require_powers_of_two

BLOCK_V = 16
"""Value channels per program: a row of a float32 state is then whole sectors of 32 bytes."""

STATE_ELEMENTS_PER_THREAD = 64
"""State elements per thread; as many registers again hold intermediate products of its sums."""

NUM_STAGES = 6
"""Pipeline stages: five tokens, each of 0.2 microseconds as computed, should cover the latency of HBM."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTile:
    """Configuration of the kernel.

    Attributes:
        block_v: Value channels per program, which has all of their key channels; a power of two.
        num_warps: Warps per program.
        num_stages: Pipeline stages: one more than the number of tokens that are copied ahead.
    """

    block_v: int
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        require_powers_of_two(self, "block_v")


PUBLIC_FIELDS = {"block_d": "block_v", "num_warps": "num_warps", "num_stages": "num_stages"}
"""Maps fields of the public configurations to fields of this one."""


def heuristic(record: LinearRecurrence, device: DeviceInfo, direction: Direction) -> StepTile:
    """Returns the default tile for a record on a device, not measured."""
    return _make_tile(record, device, 8 if is_interpreting() else BLOCK_V)


def batch_invariant(record: LinearRecurrence, device: DeviceInfo, direction: Direction) -> StepTile:
    """Returns the tile of all calls in a `batch_invariant` block."""
    return heuristic(record, device, direction)


def candidates(record: LinearRecurrence, device: DeviceInfo, direction: Direction) -> tuple[StepTile, ...]:
    """Returns tiles worth measuring for a record on a device."""
    first = heuristic(record, device, direction)
    if is_interpreting():
        return (first, dataclasses.replace(first, block_v=4))
    tiles = [_make_tile(record, device, n) for n in (8, 16, 32, 64)]
    tiles += [dataclasses.replace(x, num_warps=2 * x.num_warps) for x in tiles]
    tiles += [dataclasses.replace(first, num_stages=n) for n in (3, 10)]
    return tuple(dict.fromkeys((first, *tiles)))


def _make_tile(record: LinearRecurrence, device: DeviceInfo, block_v: int) -> StepTile:
    """Returns a tile with enough warps for its registers; with one warp its sums over key channels need no shared
    memory.
    """
    block_v = min(block_v, pad_to_power_of_two(record.value.shape[3]))
    warp_size = 64 if device.vendor == "amd" else 32
    warps = pad_to_power_of_two(record.query.shape[3]) * block_v // (STATE_ELEMENTS_PER_THREAD * warp_size)
    return StepTile(block_v=block_v, num_warps=max(1, min(warps, 8)), num_stages=NUM_STAGES)
