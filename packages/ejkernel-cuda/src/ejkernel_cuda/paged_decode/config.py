"""The configuration of paged decode attention: how many persistent blocks run, and how they are spread over heads."""

import dataclasses

from ejkernel.arithmetic import cdiv
from ejkernel.families.paged_attention import PagedAttention
from ejkernel.families.paged_attention import pages as paged_cache
from ejkernel.ops.chips import KIBI, gpu_of
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.params import Direction
from ejkernel_cuda.dense_decode.config import HEADS_PER_BLOCK

ENOUGH_BLOCKS = 0.95
"""The fraction of the chip's resident blocks that must have work: with less, several heads share a line."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedBlocks:
    """The configuration of the kernels.

    Attributes:
        num_blocks: The largest number of persistent thread blocks; each line has the same number of them.
        num_lines: Sequences of work items that are divided into equal shares separately, a divisor of the KV heads
            (times the blocks that a KV head's query heads need). Blocks of different lines read different heads at the
            same time.
    """

    num_blocks: int
    num_lines: int


def heuristic(record: PagedAttention, device: DeviceInfo, direction: Direction) -> PagedBlocks:
    """Returns as many blocks as are resident at a time, and a line per head if that leaves few blocks idle."""
    count = _resident(record, device)
    fitting = [n for n in _divisors(_items(record)) if count // n * n >= ENOUGH_BLOCKS * count]
    return PagedBlocks(num_blocks=count, num_lines=max(fitting))


def candidates(record: PagedAttention, device: DeviceInfo, direction: Direction) -> tuple[PagedBlocks, ...]:
    """Returns the heuristic's choice, one line for all heads, and twice the blocks."""
    rule = heuristic(record, device, direction)
    others = (dataclasses.replace(rule, num_lines=1), dataclasses.replace(rule, num_blocks=2 * rule.num_blocks))
    return tuple(dict.fromkeys((rule, *others)))


def launched(record: PagedAttention, config: PagedBlocks) -> tuple[int, int]:
    """Returns the blocks and lines of a call, clamped to what the record allows.

    Raises:
        ValueError: The configuration has no block or no line.
    """
    if config.num_blocks < 1 or config.num_lines < 1:
        raise ValueError(f"{config}: num_blocks and num_lines want at least 1")
    lines = max(n for n in _divisors(_items(record)) if n <= config.num_lines)
    return max(1, config.num_blocks // lines) * lines, lines


def _items(record: PagedAttention) -> int:
    """Returns the number of work items per row: blocks that its query heads need."""
    kv_heads = paged_cache.kv_heads(record)
    return kv_heads * cdiv(record.query.shape[1] // kv_heads, HEADS_PER_BLOCK)


def _resident(record: PagedAttention, device: DeviceInfo) -> int:
    """Returns the number of blocks that are resident on the chip at a time."""
    chip = gpu_of(device)
    # Matches `Shape` in csrc; the driver reserves 1 KiB of shared memory per block.
    block = 48 if max(record.query.shape[-1], paged_cache.value_size(record)) <= 64 else 96
    return chip.multiprocessors * max(1, chip.total_shared_memory // KIBI // (block + 1))


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
