"""The split-K configuration of the quantised matmul: its type, the heuristic and the candidates."""

import dataclasses

from ejkernel.arithmetic import cdiv
from ejkernel.families.quantized_matmul import QuantizedMatmul, columns
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.params import Direction

MAX_SPLITS = 8
"""The largest cluster, in blocks, that every chip with clusters supports."""
SPLIT_K_MULTIPLE = 256
"""Shares of the contracted elements are multiples of this many."""
RESIDENT_BLOCKS_BY_CLUSTER_SIZE = {1: 264, 2: 264, 3: 237, 4: 248, 5: 235, 6: 234, 7: 217, 8: 240}
"""Resident blocks by cluster size (H200), two per multiprocessor: a cluster cannot span the chip's GPCs, so some
sizes leave multiprocessors idle.
"""
RELATIVE_TIME_BY_BLOCKS_PER_SM = {1: 1.0, 2: 1.55}
"""Time per contracted element if this many blocks share a multiprocessor, relative to one block."""
BLOCK_OVERHEAD_IN_K = 200
"""The fixed cost of a block, in contracted elements: starting, filling the pipeline, and adding up sums."""

UNSPLIT_MAX_ROWS, UNSPLIT_K_MULTIPLE = 16, 256
"""For blocks that contract all of K: the largest number of rows of x, and what K must be a multiple of, so that the
scales of four groups are aligned.
"""
UNSPLIT_COLUMN_RANGE, UNSPLIT_MIN_K = (2112, 4224), 4096
"""The range of columns and the smallest K for which blocks that contract all of K are faster than clusters: blocks
of 32 columns fill between half of and all of an H200's multiprocessors, and each of 16 warps has a unit of K.
"""

WGMMA_MIN_ROWS, WGMMA_K_MULTIPLE, WGMMA_BLOCK_COLUMNS = 17, 256, 256
"""The smallest number of rows of x for the WGMMA kernel, and its blocks' unit of K and columns
(csrc/quantized_matmul/warpgroups.cuh).
"""
WGMMA_OVERHEAD_IN_K = 768
"""The fixed cost of a block of the WGMMA kernel, in contracted elements."""
MMA_MAX_ROWS, MMA_MIN_COLUMNS, MMA_K_MULTIPLE = 8, 8192, 128
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
    minimum, maximum = UNSPLIT_COLUMN_RANGE
    if supports_unsplit_k(record) and minimum <= columns(record) <= maximum and record.x.shape[1] >= UNSPLIT_MIN_K:
        return QuantizedSplits(splits=0)
    split_configs = [config for config in candidates(record, device, direction) if config.splits]
    return min(split_configs, key=lambda config: estimate_cost(record, config.splits))


def candidates(record: QuantizedMatmul, device: DeviceInfo, direction: Direction) -> tuple[QuantizedSplits, ...]:
    """Returns all numbers of splits that leave no block without work."""
    steps = cdiv(record.x.shape[1], SPLIT_K_MULTIPLE)
    minimum = 0 if supports_unsplit_k(record) else 1
    return tuple(QuantizedSplits(splits=splits) for splits in range(minimum, min(MAX_SPLITS, steps) + 1))


def supports_unsplit_k(record: QuantizedMatmul) -> bool:
    """Returns whether a kernel whose blocks contract all of K serves the record."""
    rows, k = record.x.shape
    return (
        record.transpose and record.format.group_size == 64 and rows <= UNSPLIT_MAX_ROWS and k % UNSPLIT_K_MULTIPLE == 0
    )


def uses_wgmma(record: QuantizedMatmul) -> bool:
    """Returns whether to use the WGMMA kernel, which is faster for more rows."""
    rows, k = record.x.shape
    return record.transpose and record.format.group_size == 64 and rows >= WGMMA_MIN_ROWS and k % WGMMA_K_MULTIPLE == 0


def uses_wgmma_without_transpose(record: QuantizedMatmul) -> bool:
    """Returns whether to use the WGMMA kernel without `transpose`, where it is also faster for few columns."""
    favours_mma = record.x.shape[0] <= MMA_MAX_ROWS and columns(record) >= MMA_MIN_COLUMNS
    return not record.transpose and not favours_mma


def rows_and_columns_per_block(record: QuantizedMatmul) -> tuple[int, int]:
    """Returns the rows of x and the columns of a block's tile (rows.cuh and
    transposed.cuh in csrc/quantized_matmul).
    """
    maximum, width = (64, 256) if record.transpose else (8, 512)
    return min(maximum, max(8, 1 << (record.x.shape[0] - 1).bit_length())), width


def estimate_cost(record: QuantizedMatmul, splits: int) -> float:
    """Estimates the time of a call, in contracted elements of a block that has a multiprocessor to itself.

    Resident blocks run together, and a partly empty wave takes as long as its fullest multiprocessor (wave
    quantisation).
    """
    if uses_wgmma(record) or uses_wgmma_without_transpose(record):
        return _estimate_wgmma_cost(record, splits)
    rows, width = rows_and_columns_per_block(record)
    blocks = cdiv(columns(record), width) * cdiv(record.x.shape[0], rows) * splits
    k_per_split = cdiv(record.x.shape[1], splits * SPLIT_K_MULTIPLE) * SPLIT_K_MULTIPLE
    waves, last = divmod(blocks, RESIDENT_BLOCKS_BY_CLUSTER_SIZE[splits])
    blocks_per_multiprocessor = [2] * waves + (
        [2 if last > RESIDENT_BLOCKS_BY_CLUSTER_SIZE[splits] // 2 else 1] if last else []
    )
    return sum(
        RELATIVE_TIME_BY_BLOCKS_PER_SM[blocks] * (k_per_split + BLOCK_OVERHEAD_IN_K)
        for blocks in blocks_per_multiprocessor
    )


def _estimate_wgmma_cost(record: QuantizedMatmul, splits: int) -> float:
    """Returns the same for the WGMMA kernels: a block has a multiprocessor to itself, and computes all rows of x."""
    blocks = cdiv(columns(record), WGMMA_BLOCK_COLUMNS) * splits
    k_unit = 2 * WGMMA_K_MULTIPLE if record.transpose else MMA_K_MULTIPLE  # shares are multiples of it
    k_per_split = cdiv(record.x.shape[1], splits * k_unit) * k_unit
    return cdiv(blocks, RESIDENT_BLOCKS_BY_CLUSTER_SIZE[splits] // 2) * (k_per_split + WGMMA_OVERHEAD_IN_K)
