"""The split-K configuration of the quantised matmul: its type, the heuristic and the candidates."""

import dataclasses

from ejkernel.arithmetic import cdiv
from ejkernel.families.quantized_matmul import QuantizedMatmul, columns
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.params import Direction

MAX_SPLITS = 8
"""The largest cluster, in blocks, that every chip with clusters supports."""
SHARE_STEP = 256
"""Shares of the contracted elements are multiples of this many."""
RESIDENT = {1: 264, 2: 264, 3: 237, 4: 248, 5: 235, 6: 234, 7: 217, 8: 240}
"""Resident blocks by cluster size (H200), two per multiprocessor: a cluster cannot span the chip's GPCs, so some
sizes leave multiprocessors idle.
"""
PACE = {1: 1.0, 2: 1.55}
"""Time per contracted element if this many blocks share a multiprocessor, relative to one block."""
OVERHEAD = 200
"""The fixed cost of a block, in contracted elements: starting, filling the pipeline, and adding up sums."""

WHOLE_ROWS, WHOLE_UNIT = 16, 256
"""For blocks that contract all of K: the largest number of rows of x, and what K must be a multiple of, so that the
scales of four groups are aligned.
"""
WHOLE_FIRST_COLUMNS, WHOLE_FIRST_K = (2112, 4224), 4096
"""The range of columns and the smallest K for which blocks that contract all of K are faster than clusters: blocks
of 32 columns fill between half of and all of an H200's multiprocessors, and each of 16 warps has a unit of K.
"""

WARPGROUP_ROWS, WARPGROUP_UNIT, WARPGROUP_COLUMNS = 17, 256, 256
"""The smallest number of rows of x for the WGMMA kernel, and its blocks' unit of K and columns
(csrc/quantized_matmul/warpgroups.cuh).
"""
WARPGROUP_OVERHEAD = 768
"""The fixed cost of a block of the WGMMA kernel, in contracted elements."""
ROWS_FIRST_ROWS, ROWS_FIRST_COLUMNS, ROWS_FIRST_UNIT = 8, 8192, 128
"""With `transpose=False`: the largest number of rows of x and the smallest number of columns for which the MMA kernel
is faster than the WGMMA kernel; and the WGMMA kernel's unit of K (csrc/quantized_matmul/rows_warpgroups.cuh).
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizedSplits:
    """The configuration of the kernels.

    Attributes:
        splits: Split-K: the number of blocks (a cluster) that split the contracted elements of the same columns. With 0
            a block contracts all of K, split over its warps: only with `transpose`, and up to 16 rows.
    """

    splits: int


PUBLIC_FIELDS = {"splits": "splits", "split_k": "splits"}
"""Maps fields of the public configuration to fields of `QuantizedSplits`."""


def heuristic(record: QuantizedMatmul, device: DeviceInfo, direction: Direction) -> QuantizedSplits:
    """Returns the number of splits with the lowest estimated cost."""
    least, most = WHOLE_FIRST_COLUMNS
    if has_whole_columns(record) and least <= columns(record) <= most and record.x.shape[1] >= WHOLE_FIRST_K:
        return QuantizedSplits(splits=0)
    clusters = [config for config in candidates(record, device, direction) if config.splits]
    return min(clusters, key=lambda config: cost(record, config.splits))


def candidates(record: QuantizedMatmul, device: DeviceInfo, direction: Direction) -> tuple[QuantizedSplits, ...]:
    """Returns all numbers of splits that leave no block without work."""
    steps = cdiv(record.x.shape[1], SHARE_STEP)
    least = 0 if has_whole_columns(record) else 1
    return tuple(QuantizedSplits(splits=splits) for splits in range(least, min(MAX_SPLITS, steps) + 1))


def has_whole_columns(record: QuantizedMatmul) -> bool:
    """Returns whether a kernel whose blocks contract all of K serves the record."""
    rows, k = record.x.shape
    return record.transpose and record.format.group_size == 64 and rows <= WHOLE_ROWS and k % WHOLE_UNIT == 0


def has_warpgroups(record: QuantizedMatmul) -> bool:
    """Returns whether to use the WGMMA kernel, which is faster for more rows."""
    rows, k = record.x.shape
    return record.transpose and record.format.group_size == 64 and rows >= WARPGROUP_ROWS and k % WARPGROUP_UNIT == 0


def has_row_warpgroups(record: QuantizedMatmul) -> bool:
    """Returns the same without `transpose`, where the WGMMA kernel is also faster for few columns."""
    few = record.x.shape[0] <= ROWS_FIRST_ROWS and columns(record) >= ROWS_FIRST_COLUMNS
    return not record.transpose and not few


def tile(record: QuantizedMatmul) -> tuple[int, int]:
    """Returns the rows of x and the columns of a block's tile (rows.cuh and
    transposed.cuh in csrc/quantized_matmul).
    """
    most, width = (64, 256) if record.transpose else (8, 512)
    return min(most, max(8, 1 << (record.x.shape[0] - 1).bit_length())), width


def cost(record: QuantizedMatmul, splits: int) -> float:
    """Estimates the time of a call, in contracted elements of a block that has a multiprocessor to itself.

    Resident blocks run together, and a partly empty wave takes as long as its fullest multiprocessor (wave
    quantisation).
    """
    if has_warpgroups(record) or has_row_warpgroups(record):
        return _warpgroup_cost(record, splits)
    rows, width = tile(record)
    blocks = cdiv(columns(record), width) * cdiv(record.x.shape[0], rows) * splits
    share = cdiv(record.x.shape[1], splits * SHARE_STEP) * SHARE_STEP
    waves, last = divmod(blocks, RESIDENT[splits])
    held = [2] * waves + ([2 if last > RESIDENT[splits] // 2 else 1] if last else [])
    return sum(PACE[blocks] * (share + OVERHEAD) for blocks in held)


def _warpgroup_cost(record: QuantizedMatmul, splits: int) -> float:
    """Returns the same for the WGMMA kernels, whose blocks have a multiprocessor to themselves, and all rows."""
    blocks = cdiv(columns(record), WARPGROUP_COLUMNS) * splits
    unit = 2 * WARPGROUP_UNIT if record.transpose else ROWS_FIRST_UNIT  # shares are multiples of it
    share = cdiv(record.x.shape[1], splits * unit) * unit
    return cdiv(blocks, RESIDENT[splits] // 2) * (share + WARPGROUP_OVERHEAD)
