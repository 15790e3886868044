"""Tiles and launch parameters of the decode step of a linear recurrence."""

import dataclasses

from ejkernel.arithmetic import cdiv
from ejkernel.families.linear_recurrence import LinearRecurrence, num_state_heads
from ejkernel.ops.chips import gpu_of
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.params import Direction
from ejkernel_triton.launch import is_interpreting
from ejkernel_triton.sizes import pad_to_power_of_two, require_powers_of_two

MAX_BLOCK_V = 64
"""Default value channels per program: their row of a float32 state is two cache lines."""

TRANSPOSED_BLOCK_V = 16
"""The same for a transposed state, where any number of value channels is contiguous, and sums stay in a warp."""

STATE_ELEMENTS_PER_THREAD = 64
"""State elements per thread; as many registers again hold intermediate products of its sums."""

MIN_TOKENS_FOR_DOUBLE_ELEMENTS = 4
"""Tokens per sequence from which on a thread has twice as many: the sums of 32 value channels then stay in one warp."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeTile:
    """Configuration of the decode step.

    Attributes:
        block_v: Value channels per program, which has all of their key channels; a power of two.
        num_warps: Warps per program.
        streams_state: Whether the state is evicted first from the L2 cache, since it is read once and written once.
    """

    block_v: int
    num_warps: int
    streams_state: bool

    def __post_init__(self) -> None:
        require_powers_of_two(self, "block_v")


PUBLIC_FIELDS = {"block_d": "block_v", "num_warps": "num_warps"}
"""Maps fields of the public configurations to fields of this one."""


def heuristic(record: LinearRecurrence, device: DeviceInfo, direction: Direction) -> DecodeTile:
    """Returns the default tile for a record on a device, not measured."""
    columns, elements_per_thread = record.value.shape[3], STATE_ELEMENTS_PER_THREAD
    max_block_v = TRANSPOSED_BLOCK_V if record.transposed_states else MAX_BLOCK_V
    tokens, sequences = record.query.shape[0] * record.query.shape[1], num_states(record) // num_state_heads(record)
    if (
        device.vendor == "nvidia"
        and not record.transposed_states
        and tokens >= MIN_TOKENS_FOR_DOUBLE_ELEMENTS * sequences
    ):
        max_block_v, elements_per_thread = MAX_BLOCK_V // 2, 2 * STATE_ELEMENTS_PER_THREAD
    block, multiprocessors = min(max_block_v, pad_to_power_of_two(columns)), gpu_of(device).multiprocessors
    if is_interpreting():
        return _make_tile(record, device, min(block, 8), elements_per_thread)
    # Half a cache line is still whole sectors, so few states are split more finely to reach every multiprocessor.
    while block > 16 and num_states(record) * cdiv(columns, block) < multiprocessors:
        block //= 2
    return _make_tile(record, device, block, elements_per_thread)


def candidates(record: LinearRecurrence, device: DeviceInfo, direction: Direction) -> tuple[DecodeTile, ...]:
    """Returns tiles worth measuring for a record on a device."""
    first = heuristic(record, device, direction)
    if is_interpreting():
        return (first, dataclasses.replace(first, block_v=4))
    sizes = sorted({min(n, pad_to_power_of_two(record.value.shape[3])) for n in (16, 32, 64, 128)})
    tiles = [_make_tile(record, device, n) for n in ((8, *sizes) if record.transposed_states else sizes)]
    tiles += [dataclasses.replace(x, num_warps=2 * x.num_warps) for x in tiles if x.num_warps < 8]
    tiles += [dataclasses.replace(x, streams_state=True) for x in tiles if x.block_v >= MAX_BLOCK_V]
    return tuple(dict.fromkeys((first, *tiles)))


def num_states(record: LinearRecurrence) -> int:
    """Returns the number of heads' states of the record."""
    rows = record.query.shape[0] if record.cu_seqlens is None else record.cu_seqlens.shape[0] - 1
    return rows * num_state_heads(record)


def _make_tile(
    record: LinearRecurrence, device: DeviceInfo, block_v: int, elements_per_thread: int = STATE_ELEMENTS_PER_THREAD
) -> DecodeTile:
    """Returns a tile with enough warps for its registers; with one warp its sums over key channels need no shared
    memory.
    """
    warp_size = 64 if device.vendor == "amd" else 32
    warps = pad_to_power_of_two(record.query.shape[3]) * block_v // (elements_per_thread * warp_size)
    return DecodeTile(block_v=block_v, num_warps=max(1, min(warps, 8)), streams_state=False)
