"""The compile-time constants of the grouped-matmul kernels."""

import dataclasses
import enum
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.arithmetic import cdiv
from ejkernel.families.gated_grouped_matmul import GatedGroupedMatmul
from ejkernel.families.grouped_matmul import GroupedMatmul, columns
from ejkernel.ops.device import current_device
from ejkernel.planning.precision import product_precision
from ejkernel_pallas.tpu.generations import has_256_wide_mxu, is_v7x
from ejkernel_pallas.tpu.grouped_matmul.config import TpuMatmul
from ejkernel_pallas.tpu.mosaic.vectors import LANES, SUBLANES, matrix_product

COLUMNS_PER_PRODUCT = 256
"""Columns per product, and contracted elements per product where sums are in registers."""
MAX_UNROLLED_MULTIPLICATIONS = 2**30
"""The most multiplications of a tile whose products are unrolled: libtpu takes seconds to compile more."""


class GateLayout(enum.Enum):
    """The layout of the columns of gate and factor in a matrix, and in a tile of it.

    Attributes:
        UNGATED: There is no gate; the activation is applied to a tile's columns.
        TWO_HALF_BLOCKS: The gate's columns come first. A tile is two blocks, one of each half.
        INTERLEAVED: Columns of gate and factor alternate. A tile is one block with both, which the epilogue sorts.
        ALL_COLUMNS_BLOCK: The gate's columns come first, but half of a matrix is no whole number of lane groups. A tile
            has all.
    """

    UNGATED = "ungated"
    TWO_HALF_BLOCKS = "two_half_blocks"
    INTERLEAVED = "interleaved"
    ALL_COLUMNS_BLOCK = "all_columns_block"


class Gate(NamedTuple):
    """The constants of the epilogue of a gated product. `GatedGroupedMatmul` documents the fields except the layout."""

    layout: GateLayout
    activation: str
    alpha: float
    beta: float
    limit: float | None

    @property
    def has_factor(self) -> bool:
        """Returns whether a tile has two columns of products for each of its output."""
        return self.layout is not GateLayout.UNGATED


class TileSizes(NamedTuple):
    """The sizes of a tile.

    Attributes:
        rows: Rows per tile.
        contracted: Contracted elements per tile.
        columns: Columns per tile.
    """

    rows: int
    contracted: int
    columns: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedSpec:
    """Constants of the products of rows and matrices.

    Attributes:
        num_rows: M.
        num_contracted: K of the product; for the gradient of lhs, the matrices' N.
        num_columns: N of the product.
        blocks: Tile sizes.
        transposes_matrices: Whether the product's columns are the first axis of matrices.
        operand_dtype: Dtype of the products' operands.
        precision: Precision of the products.
        scales_per_matrix: Scales along the contracted elements of a matrix; 0 for matrices without.
        contracted_per_scale: Contracted elements of the forward product per scale.
        mxu_accumulates: Whether matrix units accumulate, so that a product may be as long as a tile.
        has_wide_mxu: Whether matrix units are 256 wide.
        is_lhs_gradient: Whether this is the gradient of lhs, for which scales are along contracted elements.
        gate: The gate applied to the sums; None for a plain product. Columns are then those of the output.
    """

    num_rows: int
    num_contracted: int
    num_columns: int
    blocks: TileSizes
    transposes_matrices: bool
    operand_dtype: Any
    precision: lax.Precision | None
    scales_per_matrix: int
    contracted_per_scale: int
    mxu_accumulates: bool
    has_wide_mxu: bool
    is_lhs_gradient: bool = False
    gate: Gate | None = None

    @property
    def block_columns(self) -> int:
        """Returns the columns of one block of a matrix."""
        one_block = self.gate is not None and self.gate.layout in (GateLayout.INTERLEAVED, GateLayout.ALL_COLUMNS_BLOCK)
        return self.blocks.columns * (2 if one_block else 1)

    @property
    def num_contracted_tiles(self) -> int:
        """Returns tiles of contracted elements."""
        return cdiv(self.num_contracted, self.blocks.contracted)

    @property
    def has_partial_contracted_tile(self) -> bool:
        """Returns whether the last tile of contracted elements extends past them."""
        return self.num_contracted % self.blocks.contracted != 0

    @property
    def contracted_ranges(self) -> tuple[tuple[int, int], ...]:
        """Returns the starts and sizes of a tile's products along contracted elements; none has two scales."""
        depth = self.blocks.contracted
        per_scale = (
            math.gcd(depth, self.contracted_per_scale)
            if self.applies_scales_to_products and not self.applies_scale_to_sum
            else depth
        )
        most = per_scale if self.mxu_accumulates else COLUMNS_PER_PRODUCT
        return tuple(
            (at, min(most, start + per_scale - at))
            for start in range(0, depth, per_scale)
            for at in range(start, start + per_scale, most)
        )

    @property
    def subtile_rows(self) -> int:
        """Returns rows per subtile of a tile that groups share: at most the width of matrix units."""
        return math.gcd(self.blocks.rows, COLUMNS_PER_PRODUCT if self.has_wide_mxu else LANES)

    @property
    def columns_per_strip(self) -> int:
        """Returns the columns per product of the kernel that sums over rows; its other operand is transposed once
        per strip.
        """
        return 2 * COLUMNS_PER_PRODUCT if self.has_wide_mxu else 4 * COLUMNS_PER_PRODUCT

    @property
    def unrolls_products(self) -> bool:
        """Returns whether the products of a tile are unrolled; between iterations of a loop matrix units would drain.

        Matrix units that accumulate need less code per product.
        """
        if self.gate is not None and self.gate.layout is GateLayout.ALL_COLUMNS_BLOCK:
            return True  # its factor begins within a lane group
        is_doubled = self.gate is not None and self.gate.has_factor
        return math.prod(self.blocks) * (1 + is_doubled) <= (
            2 * MAX_UNROLLED_MULTIPLICATIONS if self.mxu_accumulates else MAX_UNROLLED_MULTIPLICATIONS
        )

    @property
    def keeps_sums_in_memory(self) -> bool:
        """Returns whether a sum is more than one product, or is read by the epilogue of a gate."""
        return (
            self.num_contracted_tiles > 1
            or len(self.contracted_ranges) > 1
            or (self.gate is not None and self.gate.has_factor)
        )

    @property
    def stages_last_product(self) -> bool:
        """Returns whether a sum's last product is staged in memory: the next sum starts before it is added, and needs
        registers.

        Not if operands are converted after loading, which takes more registers than products do.
        """
        converted = jnp.dtype(self.operand_dtype).itemsize > 2 or (
            self.scales_per_matrix > 0 and not self.applies_scales_to_products
        )
        return self.has_wide_mxu and not (self.mxu_accumulates or converted)

    @property
    def stages_row_mask(self) -> bool:
        """Returns whether the row mask of a shared tile is staged in memory, and read for all columns.

        There are few mask registers, and those of all rows would spill. The gradient's kernel would then spill operands
        instead.
        """
        return self.mxu_accumulates and self.unrolls_products and not self.is_lhs_gradient

    @property
    def reloads_first_product(self) -> bool:
        """Returns whether a sum's first product is reloaded for the next to be added, instead of kept in registers."""
        return not self.has_wide_mxu

    @property
    def applies_scales_to_products(self) -> bool:
        """Returns whether products are scaled, and not the matrices."""
        whole = self.contracted_per_scale % LANES == 0 and self.blocks.contracted % LANES == 0
        return self.scales_per_matrix > 0 and not self.is_lhs_gradient and (self.scales_per_matrix == 1 or whole)

    @property
    def applies_scale_to_sum(self) -> bool:
        """Returns whether a scale holds for a whole column, so that the sum is scaled."""
        return self.applies_scales_to_products and self.scales_per_matrix == 1


def forward_spec(record: GroupedMatmul, blocks: TileSizes) -> GroupedSpec:
    """Returns the constants of the output's kernel."""
    (rows, contracted), width = record.lhs.shape, columns(record)
    scales = 0 if record.rhs_scale is None else record.rhs_scale.shape[1]
    operand, precision = product_dtype_and_precision(record, has_more_precise_operand=scales > 1)
    return GroupedSpec(
        num_rows=rows,
        num_contracted=contracted,
        num_columns=width,
        blocks=fit_blocks_to_arrays(blocks, contracted, width),
        transposes_matrices=record.transpose_rhs,
        operand_dtype=operand,
        precision=precision,
        scales_per_matrix=scales,
        contracted_per_scale=contracted // max(1, scales),
        mxu_accumulates=is_v7x(current_device().kind),
        has_wide_mxu=has_256_wide_mxu(current_device().kind),
    )


def gated_spec(record: GatedGroupedMatmul, product_record: GroupedMatmul, blocks: TileSizes) -> GroupedSpec:
    """Returns the constants of the gated output's kernel.

    Args:
        record: The record.
        product_record: The record of its products.
        blocks: Tiles; columns are those of the output.
    """
    width = columns(product_record) // (2 if record.gated else 1)
    plain_spec = forward_spec(product_record, blocks._replace(columns=LANES))
    layout = gate_layout(record)
    return dataclasses.replace(
        plain_spec,
        num_columns=width,
        blocks=plain_spec.blocks._replace(columns=gated_block_columns(layout, width, blocks.columns)),
        gate=Gate(layout, record.activation, record.alpha, record.beta, record.limit),
    )


def gate_layout(record: GatedGroupedMatmul) -> GateLayout:
    """Returns the layout of a record's gate and factor columns."""
    if not record.gated:
        return GateLayout.UNGATED
    if record.interleaved:
        return GateLayout.INTERLEAVED
    width = record.rhs.shape[1 if record.transpose_rhs else 2] // 2
    return GateLayout.ALL_COLUMNS_BLOCK if width % LANES else GateLayout.TWO_HALF_BLOCKS


def gated_block_columns(layout: GateLayout, output_columns: int, block: int) -> int:
    """Returns columns of the output per tile: two blocks of a matrix must begin where its halves do."""
    if layout is GateLayout.ALL_COLUMNS_BLOCK or block >= output_columns:
        return output_columns
    return math.gcd(output_columns, block) if layout is GateLayout.TWO_HALF_BLOCKS and output_columns % block else block


def backward_spec(record: GroupedMatmul, blocks: TileSizes) -> GroupedSpec:
    """Returns the constants of the kernel of lhs's gradient, which multiplies with transposed matrices."""
    forward = forward_spec(record, blocks)
    operand, precision = product_dtype_and_precision(record, has_more_precise_operand=True)
    return dataclasses.replace(
        forward,
        num_contracted=forward.num_columns,
        num_columns=forward.num_contracted,
        blocks=fit_blocks_to_arrays(blocks, forward.num_columns, forward.num_contracted),
        transposes_matrices=not record.transpose_rhs,
        operand_dtype=operand,
        precision=precision,
        is_lhs_gradient=True,
    )


def matrix_gradients_spec(record: GroupedMatmul, blocks: TileSizes) -> GroupedSpec:
    """Returns the constants of the kernel of the matrices' gradients."""
    operand, precision = product_dtype_and_precision(record, has_more_precise_operand=True)
    return dataclasses.replace(forward_spec(record, blocks), operand_dtype=operand, precision=precision)


def product_dtype_and_precision(
    record: GroupedMatmul, has_more_precise_operand: bool
) -> tuple[Any, lax.Precision | None]:
    """Returns dtype and precision of products; matrix units multiply lhs's dtype, or float32 in one or six passes.

    Args:
        record: The record.
        has_more_precise_operand: Whether an operand has more digits than lhs: scaled matrices, or a cotangent.
    """
    requested_precision = product_precision(record.lhs.dtype, record.precision)
    is_exact = requested_precision in (lax.Precision.HIGH, lax.Precision.HIGHEST)
    if record.lhs.dtype == jnp.float32 or (is_exact and has_more_precise_operand):
        return jnp.float32, lax.Precision.HIGHEST if is_exact else requested_precision
    return record.lhs.dtype, None


def fit_blocks_to_arrays(blocks: TileSizes, contracted: int, columns: int) -> TileSizes:
    """Returns blocks no longer than the arrays; sizes that are not multiples of lanes must be the array's own.

    Raises:
        ValueError: A block is not valid for a kernel.
    """
    for name, size in zip(("block_m", "block_k", "block_n"), blocks, strict=True):
        if size % LANES:
            raise ValueError(f"cfg: got {name}={size}, wants a multiple of {LANES}")
    inner = contracted if blocks.contracted >= contracted else blocks.contracted
    return TileSizes(blocks.rows, inner, columns if blocks.columns >= columns else blocks.columns)


def pad_scales_to_sublanes(scale: jax.Array) -> jax.Array:
    """Returns scales [E, blocks, 1, N] as float32 [E, blocks padded to whole sublanes, N], with zeros."""
    flat = scale[:, :, 0].astype(jnp.float32)
    return jnp.pad(flat, ((0, 0), (0, -flat.shape[1] % SUBLANES), (0, 0)))


def spread_scales_over_tile(
    scales: jax.Array, first_row: Any, size: int, spec: GroupedSpec, columns_first: bool
) -> jax.Array:
    """Returns the factors of a tile of a matrix: every row has the scales of its block, by a product with ones.

    Args:
        scales: [blocks, n] of a tile's columns, padded.
        first_row: First row of the tile, in the matrix.
        size: The number of its rows.
        spec: The kernel's constants.
        columns_first: Whether the tile, and the result, is [n, size] instead of [size, n].
    """
    ones = scale_block_membership(scales.shape[0], first_row, size, spec)
    pair = (scales, ones) if columns_first else (ones, scales)
    return matrix_product(*pair, (0, 0), lax.Precision.HIGHEST)


def scale_block_membership(blocks: int, first_row: Any, size: int, spec: GroupedSpec) -> jax.Array:
    """Returns 1 where a row of a tile belongs to a block of scales, else 0: float32 [blocks, size]."""
    index = first_row + lax.broadcasted_iota(jnp.int32, (blocks, size), 1)
    block = lax.broadcasted_iota(jnp.int32, (blocks, size), 0) * spec.contracted_per_scale
    return jnp.where((index >= block) & (index < block + spec.contracted_per_scale), 1.0, 0.0)


def tile_sizes_of(config: TpuMatmul) -> TileSizes:
    """Returns the tile sizes of a configuration."""
    return TileSizes(config.block_m, config.block_k, config.block_n)
