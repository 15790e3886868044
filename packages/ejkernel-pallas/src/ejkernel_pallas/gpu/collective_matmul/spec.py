"""The compile-time constants of the collective-matmul kernels on Hopper, and their shared memory."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.families.collective_matmul import CollectiveMatmul
from ejkernel.families.ring_attention import axis_size
from ejkernel.ops.params import set_fields_as_text
from ejkernel_pallas.gpu.collective_matmul.config import BLOCK_M, HopperCollective
from ejkernel_pallas.gpu.hopper.sizes import SHARED_MEMORY_BYTES, SWIZZLE_COLUMNS, WGMMA_M

CONSUMER_WARPGROUPS = BLOCK_M // WGMMA_M
"""Consumer warpgroups, of 64 rows each."""
CONSUMER_REGISTERS_PER_THREAD, PRODUCER_REGISTERS_PER_THREAD = 232, 40
"""Registers per thread of a consumer and of the producer. A multiprocessor has 65536."""
CONTRACTED_PER_STEP = SWIZZLE_COLUMNS
"""Contracted elements per step: a swizzled row of 128 bytes."""
OUTPUT_BUFFER_COLUMNS = SWIZZLE_COLUMNS
"""Columns of an output buffer: a swizzled row."""
RESERVED_SMEM_BYTES = 2 * 1024
"""Bytes of shared memory for mbarriers and Mosaic's own use."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectiveSpec:
    """The constants of one product.

    Attributes:
        axis_name: The mesh axis; None on one device.
        num_devices: Devices along it.
        rows_per_device: Rows of the whole product that belong to one device.
        contracted_size: Contracted elements of this device.
        num_columns: Columns of this device's product.
        y_is_transposed: Whether the columns of the product are the first axis of y.
        dtype: Of the operands and of the output.
        block_n: Columns per tile.
        tile: The configuration.
    """

    axis_name: str | None
    num_devices: int
    rows_per_device: int
    contracted_size: int
    num_columns: int
    y_is_transposed: bool
    dtype: Any
    block_n: int
    tile: HopperCollective

    @property
    def tile_rows(self) -> int:
        """Returns the rows of tiles of one device's rows."""
        return self.rows_per_device // BLOCK_M

    @property
    def tile_columns(self) -> int:
        """Returns the columns of tiles."""
        return self.num_columns // self.block_n

    @property
    def tiles_per_device(self) -> int:
        """Returns the tiles of one device's rows."""
        return self.tile_rows * self.tile_columns

    @property
    def steps_per_tile(self) -> int:
        """Returns the steps of a tile."""
        return self.contracted_size // CONTRACTED_PER_STEP

    @property
    def arrivals(self) -> int:
        """Returns the number of counters: one per row of tiles that other devices send."""
        return (self.num_devices - 1) * self.tile_rows


def make_spec(
    record: CollectiveMatmul, params: HopperCollective, rows: jax.Array, y_axis: int, *, gathers: bool
) -> CollectiveSpec:
    """Returns the constants of a product of rows and the record's y.

    Args:
        record: The record, of which rows may be the cotangent.
        params: The configuration.
        rows: The device's rows to gather, or all rows of its contracted elements.
        y_axis: The contracted axis of y.
        gathers: Whether rows are gathered; otherwise those of the product are scattered.

    Raises:
        ValueError: A size is not valid for the kernels.
    """
    if params.block_n not in (128, 256):
        raise ValueError(f"cfg: got block_n={params.block_n}, the Mosaic GPU kernels want 128 or 256")
    if params.stages < 2 or params.output_buffers < 1 or params.group_m < 1:
        raise ValueError(
            f"cfg: got {set_fields_as_text(params)}, wants stages of at least 2, "
            "output_buffers and group_m of at least 1"
        )
    if shared_memory_bytes(params) > SHARED_MEMORY_BYTES - RESERVED_SMEM_BYTES:
        raise ValueError(
            f"cfg: {set_fields_as_text(params)} takes more than the {SHARED_MEMORY_BYTES} bytes of shared memory"
        )
    devices, columns = axis_size(record.axis_name), record.y.shape[1 - y_axis]
    return CollectiveSpec(
        axis_name=record.axis_name if devices > 1 else None,
        num_devices=devices,
        rows_per_device=rows.shape[0] if gathers else rows.shape[0] // devices,
        contracted_size=rows.shape[1],
        num_columns=columns,
        y_is_transposed=y_axis == 1,
        dtype=jnp.dtype(record.x.dtype),
        block_n=params.block_n if columns % params.block_n == 0 else 128,
        tile=params,
    )


def shared_memory_bytes(params: HopperCollective) -> int:
    """Returns shared memory of a kernel, without barriers."""
    stage = (BLOCK_M + params.block_n) * CONTRACTED_PER_STEP * 2
    return params.stages * stage + CONSUMER_WARPGROUPS * params.output_buffers * WGMMA_M * OUTPUT_BUFFER_COLUMNS * 2
