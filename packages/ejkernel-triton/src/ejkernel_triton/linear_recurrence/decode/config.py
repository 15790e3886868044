"""Tiles and launch parameters of the decode step of a linear recurrence."""

import dataclasses

from ejkernel.arithmetic import cdiv
from ejkernel.families.linear_recurrence import LinearRecurrence, head_count
from ejkernel.ops.chips import gpu_of
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.params import Direction
from ejkernel_triton.launch import interpreting
from ejkernel_triton.sizes import (
    padded,
)

WIDEST = 64
"""Default value channels per program: their row of a float32 state is two cache lines."""

TRANSPOSED = 16
"""The same for a transposed state, where any number of value channels is contiguous, and sums stay in a warp."""

HELD = 64
"""State elements per thread; as many registers again hold intermediate products of its sums."""

SEVERAL = 4
"""Tokens per sequence from which on a thread has twice as many: the sums of 32 value channels then stay in one warp."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeTile:
    """Configuration of the decode step.

    Attributes:
        block_v: Value channels per program, which has all of their key channels; a power of two.
        num_warps: Warps per program.
        streams: Whether the state is evicted first from the L2 cache, since it is read once and written once.
    """

    block_v: int
    num_warps: int
    streams: bool

    def __post_init__(self) -> None:
        if self.block_v < 1 or self.block_v & (self.block_v - 1):
            raise ValueError(f"block_v: got {self.block_v}, wants a power of two")


PUBLIC_FIELDS = {"block_d": "block_v", "num_warps": "num_warps"}
"""Maps fields of the public configurations to fields of this one."""


def heuristic(record: LinearRecurrence, device: DeviceInfo, direction: Direction) -> DecodeTile:
    """Returns the default tile for a record on a device, not measured."""
    columns, held = record.value.shape[3], HELD
    widest = TRANSPOSED if record.transposed_states else WIDEST
    tokens, sequences = record.query.shape[0] * record.query.shape[1], state_count(record) // head_count(record)
    if device.vendor == "nvidia" and not record.transposed_states and tokens >= SEVERAL * sequences:
        widest, held = WIDEST // 2, 2 * HELD
    block, most = min(widest, padded(columns)), gpu_of(device).multiprocessors
    if interpreting():
        return _sized(record, device, min(block, 8), held)
    # Half a cache line is still whole sectors, so few states are split more finely to reach every multiprocessor.
    while block > 16 and state_count(record) * cdiv(columns, block) < most:
        block //= 2
    return _sized(record, device, block, held)


def candidates(record: LinearRecurrence, device: DeviceInfo, direction: Direction) -> tuple[DecodeTile, ...]:
    """Returns tiles worth measuring for a record on a device."""
    first = heuristic(record, device, direction)
    if interpreting():
        return (first, dataclasses.replace(first, block_v=4))
    sizes = sorted({min(n, padded(record.value.shape[3])) for n in (16, 32, 64, 128)})
    made = [_sized(record, device, n) for n in ((8, *sizes) if record.transposed_states else sizes)]
    made += [dataclasses.replace(x, num_warps=2 * x.num_warps) for x in made if x.num_warps < 8]
    made += [dataclasses.replace(x, streams=True) for x in made if x.block_v >= WIDEST]
    return tuple(dict.fromkeys((first, *made)))


def state_count(record: LinearRecurrence) -> int:
    """Returns the number of heads' states of the record."""
    rows = record.query.shape[0] if record.cu_seqlens is None else record.cu_seqlens.shape[0] - 1
    return rows * head_count(record)


def _sized(record: LinearRecurrence, device: DeviceInfo, block_v: int, held: int = HELD) -> DecodeTile:
    """Returns a tile with enough warps for its registers; with one warp its sums over key channels need no shared
    memory.
    """
    lanes = 64 if device.vendor == "amd" else 32
    warps = padded(record.query.shape[3]) * block_v // (held * lanes)
    return DecodeTile(block_v=block_v, num_warps=max(1, min(warps, 8)), streams=False)
