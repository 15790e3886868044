"""Configuration of the quantised matmul's kernels."""

import dataclasses
from typing import Any

from ejkernel.arithmetic import cdiv
from ejkernel.families.quantized_matmul import FAMILY, QuantizedMatmul
from ejkernel.ops.chips import gpu_of
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.params import Direction
from ejkernel.planning.fixed_sizes import with_fixed_sizes
from ejkernel_triton.launch import is_interpreting


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizedTiles:
    """Configuration of a kernel.

    Attributes:
        block_m: Rows per tile.
        block_r: Rows of packed weights per tile.
        block_w: Words of packed weights per tile.
        splits: Split-K: programs that the contracted axis is split over; XLA adds up their sums.
        num_warps: Warps per program.
        num_stages: Pipeline stages of the copies of packed words.
    """

    block_m: int
    block_r: int
    block_w: int
    splits: int
    num_warps: int
    num_stages: int


PUBLIC_FIELDS = {name.name: name.name for name in dataclasses.fields(QuantizedTiles)} | {"split_k": "splits"}
"""Maps fields of the public configuration to fields of this one."""

PACKED_MATMUL_TILES = ((64, 32, 4, 4), (32, 32, 4, 4), (32, 32, 2, 4), (64, 8, 1, 4))
"""Rows, words, warps and stages of the kernel that contracts the rows of the packed matrix."""
TRANSPOSED_MATMUL_TILES = ((32, 64, 4, 3), (64, 32, 4, 3), (128, 16, 4, 3), (32, 32, 4, 4))
"""Rows, words, warps and stages of the kernel that contracts the codes inside of words."""
TARGET_PROGRAMS_PER_SM = 4
"""The number of programs per multiprocessor that split-K aims at."""


def heuristic(record: QuantizedMatmul, device: DeviceInfo, direction: Direction) -> QuantizedTiles:
    """Returns tiles for a record on a device, chosen by rule."""
    return candidates(record, device, direction)[0]


FIXED_ROWS = 64
"""Rows of the call whose configuration serves all calls in a `batch_invariant` block."""


def batch_invariant(record: QuantizedMatmul, device: DeviceInfo, direction: Direction) -> QuantizedTiles:
    """Returns the tiles for all calls in a `batch_invariant` block.

    XLA adds more than two splits in an order that depends on the rows.
    """
    tiles = heuristic(with_fixed_sizes(record, FAMILY.axes_of(record), {"m": FIXED_ROWS}), device, direction)
    return dataclasses.replace(tiles, splits=min(tiles.splits, 2))


def candidates(record: QuantizedMatmul, device: DeviceInfo, direction: Direction) -> tuple[QuantizedTiles, ...]:
    """Returns tiles worth measuring for a record on a device."""
    contracts_rows = record.transpose == (direction == "backward")
    # Tiles of 32 rows are slower than tiles of 64: 112 us instead of 49 (docs/lab/quantized_matmul_gpu.md).
    block_m = 16 if record.x.shape[0] <= 16 else 64
    configs: list[Any] = []
    for block_r, block_w, warps, stages in PACKED_MATMUL_TILES if contracts_rows else TRANSPOSED_MATMUL_TILES:
        for programs_per_sm in (TARGET_PROGRAMS_PER_SM, 2 * TARGET_PROGRAMS_PER_SM):
            splits = _num_splits(record, device, contracts_rows, (block_m, block_r, block_w), programs_per_sm)
            configs.append(
                QuantizedTiles(
                    block_m=block_m,
                    block_r=block_r,
                    block_w=block_w,
                    splits=splits,
                    num_warps=warps,
                    num_stages=stages,
                )
            )
    return tuple(dict.fromkeys(configs))


def _num_splits(
    record: QuantizedMatmul,
    device: DeviceInfo,
    contracts_rows: bool,
    blocks: tuple[int, int, int],
    programs_per_sm: int,
) -> int:
    """Returns the splits of the contracted axis that fill the device, with at least four tiles each."""
    if is_interpreting():
        return 2
    block_m, block_r, block_w = blocks
    rows, words = record.packed.shape
    tiles = cdiv(rows, block_r) if contracts_rows else cdiv(words, block_w)
    programs = (cdiv(words, block_w) if contracts_rows else cdiv(rows, block_r)) * cdiv(record.x.shape[0], block_m)
    target_splits = cdiv(programs_per_sm * gpu_of(device).multiprocessors, programs)
    # Four tiles fill the pipeline of a program; every split also stores float32 sums that are read again.
    return max(1, min(target_splits, tiles // 4))
