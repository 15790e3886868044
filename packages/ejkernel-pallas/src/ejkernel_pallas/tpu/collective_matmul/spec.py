"""The compile-time constants of the kernels of a collective matmul."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.arithmetic import cdiv
from ejkernel.families.collective_matmul import CollectiveMatmul
from ejkernel.planning.precision import product_precision
from ejkernel_pallas.tpu.collective_matmul.config import TpuCollective
from ejkernel_pallas.tpu.mosaic.launch import MIN_COMPILER_VMEM_BYTES
from ejkernel_pallas.tpu.mosaic.vectors import LANES, matrix_product

ROW_MULTIPLE = 16
"""Rows of a travelling array are padded to a multiple of this: whole registers of bfloat16."""
FIRST_COLLECTIVE_ID = 2**13
"""Barriers with smaller numbers are those of ring attention."""


class TileShape(NamedTuple):
    """Rows, columns and contracted elements of a tile, each of which divides its array."""

    rows: int
    columns: int
    contracted: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectiveSpec:
    """The compile-time constants of the kernels of a call.

    Attributes:
        axis_name: The mesh axis.
        num_devices: Devices along it, at least 2.
        operand_dtype: Dtype of the products' operands.
        precision: Precision of the products.
        collective_id: Of the barrier with which kernels begin.
        tiles: The largest tiles.
    """

    axis_name: str
    num_devices: int
    operand_dtype: Any
    precision: lax.Precision | None
    collective_id: int
    tiles: TpuCollective

    def fit_tiles(self, rows: int, columns: int, contracted: int) -> TileShape:
        """Returns tiles that divide arrays of these sizes, which are multiples of 16, 128 and 128."""
        return TileShape(
            largest_divisor(rows, self.tiles.block_m, ROW_MULTIPLE),
            largest_divisor(columns, self.tiles.block_n, LANES),
            largest_divisor(contracted, self.tiles.block_k, ROW_MULTIPLE if contracted % LANES else LANES),
        )

    def vmem_limit(self, tile: TileShape, num_sums: int) -> int:
        """Returns the bytes of VMEM for two blocks of every operand and output of products, their sums, and the
        compiler's reserve.

        Args:
            tile: The tile of one product.
            num_sums: The number of products whose tiles are in memory at once, or of float32 tiles per output.
        """
        operand_bytes = jnp.dtype(self.operand_dtype).itemsize
        blocks = num_sums * (tile.rows + tile.columns) * tile.contracted * operand_bytes
        sums = num_sums * tile.rows * tile.columns * 4
        used_bytes = 2 * blocks + 3 * sums
        return used_bytes + max(MIN_COMPILER_VMEM_BYTES, used_bytes // 4)

    @property
    def compiler_params(self) -> dict[str, Any]:
        """Returns the compiler parameters of a kernel that sends to other devices."""
        return {"has_side_effects": True, "collective_id": FIRST_COLLECTIVE_ID + self.collective_id}

    @property
    def device_index(self) -> jax.Array:
        """Returns int32 [1], the index of this device along the axis, for a kernel's scalar memory."""
        return lax.axis_index(self.axis_name).reshape(1)


def make_spec(record: CollectiveMatmul, config: TpuCollective) -> CollectiveSpec:
    """Returns the constants of a record's kernels with given tiles.

    Raises:
        ValueError: A block size is not valid for a kernel.
    """
    for field in dataclasses.fields(config):
        size = getattr(config, field.name)
        if size % LANES or size <= 0:
            raise ValueError(f"cfg: got {field.name}={size}, wants a multiple of {LANES}")
    requested = product_precision(record.x.dtype, record.precision)
    is_exact = requested in (lax.Precision.HIGH, lax.Precision.HIGHEST)
    is_wide = record.x.dtype == jnp.float32
    axis_name = str(record.axis_name)
    return CollectiveSpec(
        axis_name=axis_name,
        num_devices=lax.axis_size(axis_name),
        operand_dtype=record.x.dtype,
        # Mosaic has products in one bfloat16 pass and in six. One pass is exact for bfloat16 operands.
        precision=None if not is_wide else lax.Precision.HIGHEST if is_exact else requested,
        collective_id=record.collective_id,
        tiles=config,
    )


def largest_divisor(size: int, most: int, step: int) -> int:
    """Returns the largest multiple of `step` up to `most` that divides a size, which is a multiple of `step` too."""
    return max(block for block in range(step, min(size, most) + 1, step) if size % block == 0)


def pad_axis(x: jax.Array, axis: int, multiple: int) -> jax.Array:
    """Returns x with zeros after it along an axis, whose size is then a multiple of a number."""
    padding = cdiv(x.shape[axis], multiple) * multiple - x.shape[axis]
    return jnp.pad(x, [(0, padding if n == axis else 0) for n in range(x.ndim)]) if padding else x


def multiply_on_one_device(
    record: CollectiveMatmul, a: jax.Array, b: jax.Array, contracted_axes: tuple[int, int]
) -> jax.Array:
    """Returns the product of two matrices in float32, which is XLA's where nothing travels."""
    return matrix_product(a, b, contracted_axes, product_precision(record.x.dtype, record.precision))
