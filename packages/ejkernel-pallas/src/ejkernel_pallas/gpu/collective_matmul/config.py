"""The configuration of the collective-matmul kernels on Hopper: the heuristic, and the candidates."""

import dataclasses
from typing import Any

from ejkernel.families.collective_matmul import CollectiveMatmul
from ejkernel.ops.params import Direction

BLOCK_M = 128
"""Rows per tile: 64 for each of two consumer warpgroups."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HopperCollective:
    """The configuration of the kernels.

    Attributes:
        block_n: Columns per tile, 128 or 256; always 128 if the number of columns is no multiple of 256.
        stages: Pipeline stages: steps whose operands are in shared memory.
        output_buffers: Output buffers per warpgroup in shared memory, of 64 rows, that await their copy to device
            memory.
        group_m: Tile rows per swizzle group: they run before the next column of tiles. Rows are sent by tiles of the
            first column, so that this many blocks send at the same time.
    """

    block_n: int
    stages: int
    output_buffers: int
    group_m: int


PUBLIC_FIELDS = {"block_n": "block_n"}
"""Maps fields of the public configuration to fields of this one."""

CANDIDATES = tuple(
    HopperCollective(block_n=block_n, stages=stages, output_buffers=2, group_m=group_m)
    for block_n, stages, group_m in ((256, 4, 4), (256, 4, 8), (256, 4, 12), (128, 6, 16))
)
"""The configurations worth measuring, the default first.

On two H200, 8192 x 8192 x 28672 a GPU, forward, the first three: 0.998, 0.971 and 0.986 of the product alone for the
all-gather, 0.969, 0.933 and 0.941 for the reduce-scatter. The last is for products with an odd number of 128 columns.
"""


def heuristic(record: CollectiveMatmul, device: Any, direction: Direction) -> HopperCollective:
    """Returns the configuration of a call without a chosen or tuned one."""
    return CANDIDATES[0]


def candidates(record: CollectiveMatmul, device: Any, direction: Direction) -> tuple[HopperCollective, ...]:
    """Returns the configurations worth measuring, the best first."""
    return CANDIDATES
