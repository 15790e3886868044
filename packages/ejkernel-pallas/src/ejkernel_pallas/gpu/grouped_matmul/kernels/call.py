"""What the kernel of rows and the kernel of matrices are given."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from ejkernel_pallas.gpu.grouped_matmul.spec import GroupedSpec
from ejkernel_pallas.gpu.hopper import clusters


@dataclasses.dataclass(frozen=True)
class Call:
    """What a kernel is given.

    Attributes:
        spec: Constants.
        blocks: Clusters of thread blocks.
        operands: Arrays in device memory.
        output: The array in device memory that the kernel writes.
        shared: Shared memory and barriers: the `Shared` of the kernel's module.
        tile_counter: The counter of tiles in device memory; None where blocks take every `blocks`-th.
        same: Whether the columns of each product share their scales, of blocks of 8-bit matrices; else None.
    """

    spec: GroupedSpec
    blocks: int
    operands: dict[str, Any]
    output: Any
    shared: Any
    tile_counter: Any = None
    same: Any = None

    @property
    def below(self) -> Any:
        """Returns this block's number among those of its cluster that lie below one another."""
        return lax.axis_index(clusters.AXIS) if self.spec.tile.cluster_m > 1 else jnp.int32(0)

    @property
    def beside(self) -> Any:
        """Returns this block's number among those of its cluster that lie next to each other."""
        return lax.axis_index(clusters.AXIS) if self.spec.tile.cluster_n > 1 else jnp.int32(0)


class SubTile(NamedTuple):
    """What a warpgroup has of a tile.

    Attributes:
        rows: Which of the parts of 64 rows.
        start: First column.
        size: Columns.
        split: Whether the block has these columns alone.
    """

    rows: Any
    start: Any
    size: int
    split: bool = False
