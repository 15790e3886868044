"""The arguments that the kernel of rows and the kernel of matrix gradients share."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from ejkernel_pallas.gpu.grouped_matmul.spec import GroupedSpec
from ejkernel_pallas.gpu.hopper import clusters


@dataclasses.dataclass(frozen=True)
class Call:
    """The arguments of a kernel.

    Attributes:
        spec: Constants.
        num_blocks: Number of thread blocks, or of clusters.
        operands: Arrays in device memory.
        output: The array in device memory that the kernel writes.
        shared_memory: Shared memory and barriers: the `SharedMemory` of the kernel's module.
        tile_counter: The counter of tiles in device memory; None if blocks take every `num_blocks`-th tile.
        columns_share_scales: Whether the columns of each product share their scales, for 8-bit matrices with block
            scales; else None.
    """

    spec: GroupedSpec
    num_blocks: int
    operands: dict[str, Any]
    output: Any
    shared_memory: Any
    tile_counter: Any = None
    columns_share_scales: Any = None

    @property
    def cluster_row(self) -> Any:
        """Returns this block's index along rows in its cluster."""
        return lax.axis_index(clusters.CLUSTER_AXIS) if self.spec.tile.cluster_m > 1 else jnp.int32(0)

    @property
    def cluster_column(self) -> Any:
        """Returns this block's index along columns in its cluster."""
        return lax.axis_index(clusters.CLUSTER_AXIS) if self.spec.tile.cluster_n > 1 else jnp.int32(0)


class SubTile(NamedTuple):
    """The part of a tile that a warpgroup computes.

    Attributes:
        row_block_index: Index of its 64 rows.
        first_column: First column.
        num_columns: Columns.
        is_half_tile: Whether another block has the tile's other columns.
    """

    row_block_index: Any
    first_column: Any
    num_columns: int
    is_half_tile: bool = False
