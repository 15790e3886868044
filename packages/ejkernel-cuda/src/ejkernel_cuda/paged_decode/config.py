"""The persistent blocks of paged decoding: how many run, and which of them read neighbouring heads."""

import dataclasses

from ejkernel.families.paged_attention import PagedAttention
from ejkernel.families.paged_attention import pages as paged_cache
from ejkernel.ops.chips import KIBI, gpu_of
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.params import Direction
from ejkernel_cuda.dense_decode.config import HEADS_PER_BLOCK

ENOUGH_BLOCKS = 0.95
"""Part of the blocks that the chip can run below which lines of heads are joined."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedBlocks:
    """The configuration of the kernels.

    Attributes:
        num_blocks: Persistent thread blocks, at most; each line has equally many.
        num_lines: Lines of key tiles that are shared out apart, a divisor of the number of KV heads (times the blocks
            that a KV head's query heads take). As many heads of the same keys are read side by side.
    """

    num_blocks: int
    num_lines: int


def heuristic(record: PagedAttention, device: DeviceInfo, direction: Direction) -> PagedBlocks:
    """As many blocks as the chip runs at a time, and a line for each head where that leaves few blocks idle."""
    count = _resident(record, device)
    fitting = [n for n in _divisors(_items(record)) if count // n * n >= ENOUGH_BLOCKS * count]
    return PagedBlocks(num_blocks=count, num_lines=max(fitting))


def candidates(record: PagedAttention, device: DeviceInfo, direction: Direction) -> tuple[PagedBlocks, ...]:
    """The heuristic's choice, one line for all heads, and twice as many blocks."""
    rule = heuristic(record, device, direction)
    others = (dataclasses.replace(rule, num_lines=1), dataclasses.replace(rule, num_blocks=2 * rule.num_blocks))
    return tuple(dict.fromkeys((rule, *others)))


def launched(record: PagedAttention, config: PagedBlocks) -> tuple[int, int]:
    """Blocks and lines of a call: a configuration's, made to fit the record.

    Raises:
        ValueError: The configuration has no block or no line.
    """
    if config.num_blocks < 1 or config.num_lines < 1:
        raise ValueError(f"{config}: num_blocks and num_lines want at least 1")
    lines = max(n for n in _divisors(_items(record)) if n <= config.num_lines)
    return max(1, config.num_blocks // lines) * lines, lines


def _items(record: PagedAttention) -> int:
    """Blocks' worth of query heads of a row."""
    kv_heads = paged_cache.kv_heads(record)
    return kv_heads * -(-record.query.shape[1] // kv_heads // HEADS_PER_BLOCK)


def _resident(record: PagedAttention, device: DeviceInfo) -> int:
    """Blocks that the chip runs at a time."""
    chip = gpu_of(device)
    # As `Shape` in csrc/decode.cuh; of each block's shared memory, the driver keeps 1 KiB.
    block = 48 if max(record.query.shape[-1], paged_cache.value_size(record)) <= 64 else 96
    return chip.multiprocessors * max(1, chip.total_shared_memory // KIBI // (block + 1))


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
