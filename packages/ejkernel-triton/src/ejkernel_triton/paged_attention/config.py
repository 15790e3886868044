"""Tile sizes and launch parameters of the paged-attention kernels."""

import dataclasses

from ejkernel.families.paged_attention import PagedAttention
from ejkernel.ops.config.params import Direction
from ejkernel.ops.device import DeviceInfo
from ejkernel.planning import paged_cache
from ejkernel_triton.launch import interpreting


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedForward:
    """Configuration of the paged-attention kernels.

    Attributes:
        block_q: Query rows of one sequence a tile; with all query heads of a KV head they make a tile of scores.
        block_kv: Keys a tile.
        num_programs: Programs that the key tiles of a call are dealt to.
        num_warps: Warps a program.
        num_stages: Pipeline stages: tiles of keys and values that are copied ahead.
    """

    block_q: int
    block_kv: int
    num_programs: int
    num_warps: int
    num_stages: int


SCORE_ROWS = 64
"""Rows of a tile of scores where sequences have many query rows."""

PROGRAMS_PER_SM = 2

STREAMING_MULTIPROCESSORS = {7.0: 80, 8.0: 108, 8.6: 84, 8.9: 142, 9.0: 132, 10.0: 148, 12.0: 170}
"""By compute capability; of chips that are not here, that of Hopper's."""


def heuristic(record: PagedAttention, device: DeviceInfo, direction: Direction) -> PagedForward:
    """Tile sizes for a record on a device: many rows a tile where sequences have many, else as few as can be."""
    return _sized(record, device, 64 if record.query.shape[-1] <= 128 else 32, 4, 3)


def candidates(record: PagedAttention, device: DeviceInfo, direction: Direction) -> tuple[PagedForward, ...]:
    """Tile sizes worth measuring for a record on a device."""
    options = ((32, 4, 3), (64, 4, 2), (64, 4, 3), (128, 4, 2), (128, 8, 3))
    return tuple(dict.fromkeys(_sized(record, device, *option) for option in options))


def _sized(record: PagedAttention, device: DeviceInfo, block_kv: int, warps: int, stages: int) -> PagedForward:
    rows, heads, _ = record.query.shape
    group = heads // paged_cache.kv_heads(record)
    average = 1 if record.query_start is None else -(-rows // max(1, record.kv_lens.shape[0]))
    wanted = min(average, max(1, SCORE_ROWS // group))
    if interpreting():
        block_kv, programs = min(block_kv, 16), 3
    else:
        programs = PROGRAMS_PER_SM * STREAMING_MULTIPROCESSORS.get(device.compute_capability or 9.0, 132)
    return PagedForward(
        block_q=1 << (wanted - 1).bit_length(),
        block_kv=block_kv,
        num_programs=programs,
        num_warps=warps,
        num_stages=stages,
    )
