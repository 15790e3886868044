"""Split-K of the quantised matmul's kernels: the heuristic, and the candidates that are worth measuring."""

import dataclasses

from ejkernel.families.quantized_matmul import QuantizedMatmul, columns
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.params import Direction

MAX_SPLITS = 8
"""Blocks of a cluster on every chip that has clusters."""
SHARE_STEP = 256
"""Contracted elements that shares are multiples of."""
RESIDENT = {1: 264, 2: 264, 3: 237, 4: 248, 5: 235, 6: 234, 7: 217, 8: 240}
"""Blocks that run at a time in clusters of so many, two a multiprocessor: all blocks of one are in one of the chip's
parts (H200)."""
PACE = {1: 1.0, 2: 1.55}
"""Time of a contracted element where so many blocks share a multiprocessor."""
OVERHEAD = 200
"""What a block costs beside its share, in contracted elements: it starts, fills its pipeline, and adds up sums."""

WHOLE_ROWS, WHOLE_UNIT = 16, 256
"""Most rows of x of blocks with all contracted elements, and what these are a multiple of: scales of four groups are
aligned."""
WHOLE_FIRST_COLUMNS, WHOLE_FIRST_K = (2112, 4224), 4096
"""Where they are faster than clusters: blocks of 32 columns for half of an H200's multiprocessors to all of them, and
contracted elements that give each of 16 warps a unit."""

WARPGROUP_ROWS, WARPGROUP_UNIT, WARPGROUP_COLUMNS = 17, 256, 256
"""Fewest rows of x whose products are those of warpgroups, contracted elements that their blocks take at a time, and
columns of a block (csrc/quantized_warpgroups.cuh)."""
WARPGROUP_OVERHEAD = 768
"""What such a block costs beside its share, in contracted elements."""
ROWS_FIRST_ROWS, ROWS_FIRST_COLUMNS, ROWS_FIRST_UNIT = 8, 8192, 128
"""Without `transpose`: rows of x up to which, and columns from which on, other products are faster than those of
warpgroups, and contracted elements that the blocks of these take at a time (csrc/quantized_rows_warpgroups.cuh)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizedSplits:
    """The configuration of the kernels.

    Attributes:
        splits: Split-K: blocks, a cluster, that share the contracted elements of the same columns. With 0 a block has
            all of its columns, and its warps share them: only `transpose`, up to 16 rows.
    """

    splits: int


FACES = {"splits": "splits", "split_k": "splits"}
"""Fields of the public configuration and what they set here."""


def heuristic(record: QuantizedMatmul, device: DeviceInfo, direction: Direction) -> QuantizedSplits:
    """The splits that should take the least time."""
    least, most = WHOLE_FIRST_COLUMNS
    if has_whole_columns(record) and least <= columns(record) <= most and record.x.shape[1] >= WHOLE_FIRST_K:
        return QuantizedSplits(splits=0)
    clusters = [config for config in candidates(record, device, direction) if config.splits]
    return min(clusters, key=lambda config: cost(record, config.splits))


def candidates(record: QuantizedMatmul, device: DeviceInfo, direction: Direction) -> tuple[QuantizedSplits, ...]:
    """All numbers of splits of which each has something to do."""
    steps = -(-record.x.shape[1] // SHARE_STEP)
    least = 0 if has_whole_columns(record) else 1
    return tuple(QuantizedSplits(splits=splits) for splits in range(least, min(MAX_SPLITS, steps) + 1))


def has_whole_columns(record: QuantizedMatmul) -> bool:
    """Whether blocks can have all contracted elements of their columns."""
    rows, k = record.x.shape
    return record.transpose and record.format.group_size == 64 and rows <= WHOLE_ROWS and k % WHOLE_UNIT == 0


def has_warpgroups(record: QuantizedMatmul) -> bool:
    """Whether the products are those of warpgroups, which more rows are faster with."""
    rows, k = record.x.shape
    return record.transpose and record.format.group_size == 64 and rows >= WARPGROUP_ROWS and k % WARPGROUP_UNIT == 0


def has_row_warpgroups(record: QuantizedMatmul) -> bool:
    """The same without `transpose`, where few columns are faster with them, too."""
    few = record.x.shape[0] <= ROWS_FIRST_ROWS and columns(record) >= ROWS_FIRST_COLUMNS
    return not record.transpose and not few


def tile(record: QuantizedMatmul) -> tuple[int, int]:
    """Rows of x and columns of a block (csrc/quantized_rows.cuh and csrc/quantized_transposed.cuh)."""
    most, width = (64, 256) if record.transpose else (8, 512)
    return min(most, max(8, 1 << (record.x.shape[0] - 1).bit_length())), width


def cost(record: QuantizedMatmul, splits: int) -> float:
    """Time by rule, in contracted elements of a block that has a multiprocessor to itself.

    Wave quantisation: as many blocks as the chip holds run at a time, and a partly empty wave takes as long as the
    fullest multiprocessor.
    """
    if has_warpgroups(record) or has_row_warpgroups(record):
        return _warpgroup_cost(record, splits)
    rows, width = tile(record)
    blocks = -(-columns(record) // width) * -(-record.x.shape[0] // rows) * splits
    share = -(-record.x.shape[1] // (splits * SHARE_STEP)) * SHARE_STEP
    waves, last = divmod(blocks, RESIDENT[splits])
    held = [2] * waves + ([2 if last > RESIDENT[splits] // 2 else 1] if last else [])
    return sum(PACE[blocks] * (share + OVERHEAD) for blocks in held)


def _warpgroup_cost(record: QuantizedMatmul, splits: int) -> float:
    """The same where a block has a multiprocessor to itself, and all rows."""
    blocks = -(-columns(record) // WARPGROUP_COLUMNS) * splits
    unit = 2 * WARPGROUP_UNIT if record.transpose else ROWS_FIRST_UNIT  # shares are multiples of it
    share = -(-record.x.shape[1] // (splits * unit)) * unit
    return -(-blocks // (RESIDENT[splits] // 2)) * (share + WARPGROUP_OVERHEAD)
