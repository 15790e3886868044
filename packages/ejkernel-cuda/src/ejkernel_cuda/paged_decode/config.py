"""The configuration of paged decode attention: how many persistent blocks run, and how they are spread over heads."""

import dataclasses

from ejkernel.arithmetic import cdiv
from ejkernel.families.paged_attention import PagedAttention
from ejkernel.families.paged_attention import pages as paged_cache
from ejkernel.ops.chips import KIBI, gpu_of
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.params import Direction
from ejkernel_cuda.dense_decode.config import HEADS_PER_BLOCK

MIN_BUSY_BLOCK_FRACTION = 0.95
"""The fraction of the chip's resident blocks that must have work: with less, several heads share a work queue."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedDecodeGrid:
    """The configuration of the kernels.

    Attributes:
        num_thread_blocks: The largest number of persistent thread blocks; each work queue has the same number of them.
        num_work_queues: Work queues, whose items are divided equally among the blocks of each; a divisor of the KV
            heads (times the blocks that a KV head's query heads need). Blocks of different queues read different heads
            at the same time.
    """

    num_thread_blocks: int
    num_work_queues: int


def heuristic(record: PagedAttention, device: DeviceInfo, direction: Direction) -> PagedDecodeGrid:
    """Returns as many blocks as are resident at a time, and a work queue per head if that leaves few blocks idle."""
    return choose_grid(record, _num_resident_blocks_on_chip(record, device), HEADS_PER_BLOCK)


def choose_grid(record: PagedAttention, resident_blocks: int, heads_per_block: int) -> PagedDecodeGrid:
    """Returns `resident_blocks` blocks, and a work queue per `heads_per_block` query heads if few blocks stay idle."""
    queue_counts = [
        n
        for n in _divisors(_num_work_items_per_row(record, heads_per_block))
        if resident_blocks // n * n >= MIN_BUSY_BLOCK_FRACTION * resident_blocks
    ]
    return PagedDecodeGrid(num_thread_blocks=resident_blocks, num_work_queues=max(queue_counts))


def candidates(record: PagedAttention, device: DeviceInfo, direction: Direction) -> tuple[PagedDecodeGrid, ...]:
    """Returns the heuristic's choice, one work queue for all heads, and twice the blocks."""
    return grid_candidates(heuristic(record, device, direction))


def grid_candidates(default: PagedDecodeGrid) -> tuple[PagedDecodeGrid, ...]:
    """Returns a configuration, one work queue for all heads, and twice the blocks."""
    variants = (
        dataclasses.replace(default, num_work_queues=1),
        dataclasses.replace(default, num_thread_blocks=2 * default.num_thread_blocks),
    )
    return tuple(dict.fromkeys((default, *variants)))


def thread_blocks_and_queues(
    record: PagedAttention, config: PagedDecodeGrid, heads_per_block: int = HEADS_PER_BLOCK
) -> tuple[int, int]:
    """Returns the numbers of thread blocks and of work queues of a call, clamped to what the record allows.

    Raises:
        ValueError: The configuration has no thread block or no work queue.
    """
    if config.num_thread_blocks < 1 or config.num_work_queues < 1:
        raise ValueError(f"cfg: got {config}, wants num_thread_blocks and num_work_queues of at least 1")
    num_queues = max(
        n for n in _divisors(_num_work_items_per_row(record, heads_per_block)) if n <= config.num_work_queues
    )
    return max(1, config.num_thread_blocks // num_queues) * num_queues, num_queues


def _num_work_items_per_row(record: PagedAttention, heads_per_block: int) -> int:
    """Returns the number of work items per row: blocks that its query heads need."""
    kv_heads = paged_cache.kv_heads(record)
    return kv_heads * cdiv(record.query.shape[1] // kv_heads, heads_per_block)


def _num_resident_blocks_on_chip(record: PagedAttention, device: DeviceInfo) -> int:
    """Returns the number of blocks that are resident on the chip at a time."""
    chip = gpu_of(device)
    # Matches `Shape` in csrc; the driver reserves 1 KiB of shared memory per block.
    shared_memory_kib = 48 if max(record.query.shape[-1], paged_cache.value_head_dim(record)) <= 64 else 96
    return chip.multiprocessors * max(1, chip.total_shared_memory // KIBI // (shared_memory_kib + 1))


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
