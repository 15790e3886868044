"""The configuration of decode attention over codes: `PagedDecodeGrid`, for blocks that fill a multiprocessor."""

from ejkernel.families.paged_attention import PagedAttention
from ejkernel.ops.chips import gpu_of
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.params import Direction
from ejkernel_cuda.paged_decode.config import PagedDecodeGrid, choose_grid, grid_candidates

HEADS_PER_BLOCK = 8
"""Query heads per block, all of one KV head: the columns of an MMA tile."""


def heuristic(record: PagedAttention, device: DeviceInfo, direction: Direction) -> PagedDecodeGrid:
    """Returns a block for each multiprocessor, and a work queue per head if that leaves few blocks idle."""
    return choose_grid(record, gpu_of(device).multiprocessors, HEADS_PER_BLOCK)


def candidates(record: PagedAttention, device: DeviceInfo, direction: Direction) -> tuple[PagedDecodeGrid, ...]:
    """Returns the heuristic's choice, one work queue for all heads, and twice the blocks."""
    return grid_candidates(heuristic(record, device, direction))
