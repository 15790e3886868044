"""Tile sizes: the heuristic for calls without a measured configuration, and the candidates."""

import dataclasses
from typing import Any

from ejkernel.families.collective_matmul import CollectiveMatmul
from ejkernel.ops.params import Direction


@dataclasses.dataclass(frozen=True, kw_only=True)
class TpuCollective:
    """The configuration of each kernel; all sizes are multiples of 128.

    Attributes:
        block_m: Rows per tile; of y's gradient, its rows.
        block_n: Columns per tile.
        block_k: Contracted elements per step.
    """

    block_m: int
    block_n: int
    block_k: int


PUBLIC_FIELDS = {name.name: name.name for name in dataclasses.fields(TpuCollective)}
"""Maps fields of the public configuration to fields of this one."""

TILE_SIZES = ((1024, 1024, 1024), (1024, 1024, 512), (512, 2048, 512), (512, 1024, 1024), (256, 1024, 512))
"""Rows, columns and contracted elements per tile of 16-bit operands, the default first."""


def heuristic(record: CollectiveMatmul, device: Any, direction: Direction) -> TpuCollective:
    """Returns the tiles for a record on a device, found with the static profile."""
    return candidates(record, device, direction)[0]


def candidates(record: CollectiveMatmul, device: Any, direction: Direction) -> tuple[TpuCollective, ...]:
    """Returns tiles worth measuring for a record on a device: of float32, with half of the columns."""
    halves = record.x.dtype.itemsize // 2
    return tuple(TpuCollective(block_m=m, block_n=n // halves, block_k=k) for m, n, k in TILE_SIZES)
