"""The compile-time constants of the grouped-matmul kernels on Hopper, and their shared memory."""

import dataclasses
import enum
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.arithmetic import cdiv
from ejkernel.families.gated_grouped_matmul import GatedGroupedMatmul
from ejkernel.families.grouped_matmul import GroupedMatmul, columns
from ejkernel.families.grouped_matmul.row_tiles import max_num_row_tiles
from ejkernel.ops.params import set_fields_as_text
from ejkernel_pallas.gpu.grouped_matmul.config import (
    HopperFp8,
    HopperGated,
    HopperGrouped,
    TileOptions,
    plain_product_record,
    sums_on_tensor_cores,
)
from ejkernel_pallas.gpu.hopper.sizes import SHARED_MEMORY_BYTES, SWIZZLE_COLUMNS, WGMMA_M

CONTRACTED_PER_STEP_16_BIT = 64
"""Contracted elements per step of 16 bits: a swizzled row of 128 bytes."""
CONSUMER_WARPGROUPS = 2
"""Consumer warpgroups."""
CONSUMER_REGISTERS_PER_THREAD, PRODUCER_REGISTERS_PER_THREAD = 240, 24
"""Registers per thread of a consumer and of the producer. A multiprocessor has 65536."""
REGISTERS_PER_THREAD_WITH_GATHER = (232, 40)
"""The same for gathered rows: a producer thread keeps the addresses of eight rows."""
SCALE_BLOCKS_PER_COPY = 4
"""Blocks of contracted elements whose scales of a row are copied together: 16 bytes, the smallest bulk copy."""
PRODUCTS_DURING_STORE = 2
"""Products of a tile that run while the previous tile is stored."""
RESERVED_SMEM_BYTES = 2 * 1024
"""Bytes of shared memory for mbarriers and Mosaic's own use."""
SWIZZLED_ROW_BYTES = 128
"""Bytes of a swizzled row."""
BLOCK_M = CONSUMER_WARPGROUPS * WGMMA_M
"""Rows per tile: 64 for each consumer warpgroup."""

FP8_OPERAND_DTYPE = "float8_e4m3fn"
"""The dtype of rows and matrices."""
FP8_CONTRACTED_PER_STEP = SWIZZLED_ROW_BYTES
"""Contracted elements per step: a swizzled row of 8 bits."""
MAX_FP8_BLOCK_N = 256
"""The largest number of columns per tile: one copy loads their scales, and a warpgroup's registers hold their sums."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaleConstants:
    """Constants of the kernels of rows with operands of 8 bits and scales.

    Attributes:
        lhs_scale_blocks: Blocks of contracted elements with a scale each, per row.
        rhs_scale_blocks: The same per column.
        product_n: Columns per WGMMA product.
        sums_on_tensor_cores: Whether tensor cores accumulate over all steps.
        split_by_columns: Whether a warpgroup has all rows of a tile, and the columns of one product.
        dynamic_schedule: Whether blocks get their next tile from an atomic counter.
    """

    lhs_scale_blocks: int
    rhs_scale_blocks: int
    product_n: int
    sums_on_tensor_cores: bool
    split_by_columns: bool
    dynamic_schedule: bool

    @property
    def copies_row_scales(self) -> bool:
        """Returns whether scales of rows are copied in bulk: a warpgroup with all rows of a tile has too many for
        loads, whose addresses would take registers.
        """
        return (
            self.split_by_columns and self.lhs_scale_blocks > 1 and self.lhs_scale_blocks % SCALE_BLOCKS_PER_COPY == 0
        )


class GateColumnOrder(enum.Enum):
    """The order of a gated matrix's panels of 64 columns in a stage."""

    GATE_AND_FACTOR_HALVES = "gate and factor"
    """A panel of the gate, then one of its factor."""
    INTERLEAVED = "pairs"
    """Columns of the gate and of the factor are interleaved."""
    NO_GATE = "no gate"
    """The output is the activation of all columns."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActivationConstants:
    """Constants of the kernels of rows whose products pass through an activation, which may be the gate of a factor.

    Attributes:
        activation: The activation function: "silu", "gelu" or, without a gate, "relu2".
        alpha: Factor in the sigmoid of silu.
        beta: Added to the factor.
        limit: The largest value of the gate, and the largest magnitude of the factor; None for none.
        gate_column_order: How the columns of gate and factor alternate in a stage.
        views_interleaved_rows_as_pairs: Whether the kernel has a view [F, 2 contracted] of transposed matrices with
            interleaved rows.
        has_bias: Whether products have a bias.
        gathers_rows: Whether rows are gathered by index.
        single_warpgroup: Whether one warpgroup alone multiplies tiles of at most 64 rows.
    """

    activation: str
    alpha: float
    beta: float
    limit: float | None
    gate_column_order: GateColumnOrder
    views_interleaved_rows_as_pairs: bool
    has_bias: bool
    gathers_rows: bool
    single_warpgroup: bool

    @property
    def matrix_columns_per_output_column(self) -> int:
        """Returns the columns of a matrix per column of the output."""
        return 1 if self.gate_column_order is GateColumnOrder.NO_GATE else 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedSpec:
    """Constants of a kernel.

    Attributes:
        num_rows: M.
        contracted_size: Contracted elements in the kernels of rows; rows of the result in the kernel of matrix
            gradients.
        num_columns: Columns of the result.
        num_matrices: E.
        matrices_are_transposed: Whether the columns of the result are the first axis of matrices.
        operand_dtype: Dtype of the operands.
        out_dtype: Dtype of the result.
        tile: The configuration.
        scale_constants: Constants for 8-bit operands; None for 16-bit ones.
        activation_constants: Constants of the gated product; None for the plain product.
    """

    num_rows: int
    contracted_size: int
    num_columns: int
    num_matrices: int
    matrices_are_transposed: bool
    operand_dtype: Any
    out_dtype: Any
    tile: HopperGrouped
    scale_constants: ScaleConstants | None = None
    activation_constants: ActivationConstants | None = None

    @property
    def gathers_rows(self) -> bool:
        """Returns whether rows are gathered."""
        return self.activation_constants is not None and self.activation_constants.gathers_rows

    @property
    def dynamic_schedule(self) -> bool:
        """Returns whether blocks get their next tile from a counter; otherwise they take every `num_blocks`-th tile."""
        return self.scale_constants is not None and self.scale_constants.dynamic_schedule

    @property
    def registers_per_thread(self) -> tuple[int, int]:
        """Returns registers per thread of a consumer, and of the producer."""
        return (
            REGISTERS_PER_THREAD_WITH_GATHER
            if self.gathers_rows
            else (CONSUMER_REGISTERS_PER_THREAD, PRODUCER_REGISTERS_PER_THREAD)
        )

    @property
    def panels_per_stage(self) -> int:
        """Returns panels of 64 columns in a stage of a gated matrix."""
        return self.num_panels(self.tile.block_n)

    def num_panels(self, columns: int) -> int:
        """Returns panels of 64 columns that are multiplied for some columns of a gated product's output."""
        assert self.activation_constants is not None  # set for the gated product
        return self.activation_constants.matrix_columns_per_output_column * columns // SWIZZLE_COLUMNS

    @property
    def contracted_per_step(self) -> int:
        """Returns contracted elements per step in the kernels of rows: a swizzled row."""
        return SWIZZLED_ROW_BYTES // jnp.dtype(self.operand_dtype).itemsize

    @property
    def output_buffer_columns(self) -> int:
        """Returns the columns of a result per output buffer: a swizzled row."""
        return SWIZZLED_ROW_BYTES // jnp.dtype(self.out_dtype).itemsize

    @property
    def blocks_per_cluster(self) -> int:
        """Returns blocks per cluster."""
        return self.tile.cluster_m * self.tile.cluster_n

    @property
    def num_column_tiles(self) -> int:
        """Returns the number of tiles of columns, over all members of a cluster."""
        return cdiv(self.num_columns, self.tile.block_n * self.tile.cluster_n)

    @property
    def tile_rows_per_matrix(self) -> int:
        """Returns the number of tile rows per matrix, over all members of a cluster, in the kernel of matrix
        gradients.
        """
        return cdiv(self.contracted_size, BLOCK_M * self.tile.cluster_m)

    @property
    def stores_during_next_tile(self) -> bool:
        """Returns whether tiles are stored during the first products of the next one."""
        return self.tile.overlap and self.out_dtype.itemsize == 2

    @property
    def may_split_last_tiles(self) -> bool:
        """Returns whether the last tiles may be split by columns into two work items each."""
        product = (
            self.scale_constants.product_n
            if self.scale_constants and not self.scale_constants.sums_on_tensor_cores
            else SWIZZLE_COLUMNS
        )
        whole = self.tile.block_n % (2 * product) == 0
        return whole and not (
            self.tile.overlap or self.tile.half_columns or self.partial_tile_columns or self.blocks_per_cluster > 1
        )

    @property
    def tiles_divide_columns(self) -> bool:
        """Returns whether tiles divide the output's columns."""
        return self.num_columns == self.num_column_tiles * self.tile.block_n * self.tile.cluster_n

    @property
    def partial_tile_columns(self) -> int:
        """Returns the columns of a partial last tile, or 0 if there is none."""
        return self.num_columns % self.tile.block_n

    @property
    def steps_per_tile(self) -> int:
        """Returns the steps per tile in the kernels of rows."""
        return self.contracted_size // self.contracted_per_step

    @property
    def tile_list_length(self) -> int:
        """Returns entries of the tile list."""
        return max_num_row_tiles(self.num_rows, self.num_matrices, BLOCK_M)


def make_spec(record: GroupedMatmul, params: HopperGrouped, out_dtype: Any) -> GroupedSpec:
    """Returns the constants of the forward kernel.

    Raises:
        ValueError: A tile size is not valid for the kernel.
    """
    if params.block_n not in (64, 128, 192, 256):
        raise ValueError(f"cfg: got block_n={params.block_n}, the Mosaic GPU kernels want 64, 128, 192 or 256")
    if params.stages < 2 or params.output_buffers < 1 or params.group_m < 1:
        raise ValueError(
            f"cfg: got {set_fields_as_text(params)}, wants stages of at least 2, "
            "output_buffers and group_m of at least 1"
        )
    if (params.cluster_m, params.cluster_n) not in ((1, 1), (1, 2), (2, 1)):
        raise ValueError(
            f"cfg: got {set_fields_as_text(params)}, wants cluster_m and cluster_n of 1 and 1, 1 and 2, or 2 and 1"
        )
    if shared_memory_bytes(params) > SHARED_MEMORY_BYTES - RESERVED_SMEM_BYTES:
        raise ValueError(
            f"cfg: {set_fields_as_text(params)} takes more than the {SHARED_MEMORY_BYTES} bytes of shared memory"
        )
    return GroupedSpec(
        num_rows=record.lhs.shape[0],
        contracted_size=record.lhs.shape[1],
        num_columns=columns(record),
        num_matrices=record.rhs.shape[0],
        matrices_are_transposed=record.transpose_rhs,
        operand_dtype=jnp.dtype(record.lhs.dtype),
        out_dtype=jnp.dtype(out_dtype),
        tile=params,
    )


def shared_memory_bytes(params: HopperGrouped) -> int:
    """Returns shared memory of a kernel, without barriers."""
    # Operands have 16 bits; an output buffer has a swizzled row of 128 bytes for each of 64 rows, for any dtype.
    stage = (BLOCK_M + params.block_n) * CONTRACTED_PER_STEP_16_BIT * 2
    return params.stages * stage + CONSUMER_WARPGROUPS * params.output_buffers * WGMMA_M * SWIZZLED_ROW_BYTES


def make_fp8_spec(record: GroupedMatmul, params: HopperFp8) -> GroupedSpec:
    """Returns the constants of the kernel.

    Raises:
        ValueError: A tile size is not valid for the kernel.
    """
    fields = set_fields_as_text(params)
    size, product = params.block_n, params.product_n
    if not 0 < size <= MAX_FP8_BLOCK_N or size % SWIZZLE_COLUMNS:
        raise ValueError(f"cfg: got block_n={size}, wants a multiple of {SWIZZLE_COLUMNS} up to {MAX_FP8_BLOCK_N}")
    # An output buffer has 64 columns of 16 bits, or 32 of 32 bits.
    part = SWIZZLED_ROW_BYTES // jnp.dtype(record.out_dtype).itemsize
    if product <= 0 or product % part or size % product:
        raise ValueError(f"cfg: got product_n={product}, wants a divisor of block_n={size} and a multiple of {part}")
    if params.stages < 2 or params.output_buffers < 1 or params.group_m < 1:
        raise ValueError(f"cfg: got {fields}, wants stages of at least 2, output_buffers and group_m of at least 1")
    if fp8_shared_memory_bytes(params) > SHARED_MEMORY_BYTES - RESERVED_SMEM_BYTES:
        raise ValueError(f"cfg: {fields} takes more than the {SHARED_MEMORY_BYTES} bytes of shared memory")
    assert record.lhs_scale is not None  # a requirement of the kernel
    assert record.rhs_scale is not None
    split_by_columns = params.split_by_columns and size == CONSUMER_WARPGROUPS * product
    return GroupedSpec(
        num_rows=record.lhs.shape[0],
        contracted_size=record.lhs.shape[1],
        num_columns=columns(record),
        num_matrices=record.rhs.shape[0],
        matrices_are_transposed=True,
        operand_dtype=jnp.dtype(record.lhs.dtype),
        out_dtype=jnp.dtype(record.out_dtype),
        tile=HopperGrouped(**TileOptions(size, params.stages, params.output_buffers, params.group_m).config_fields),
        scale_constants=ScaleConstants(
            lhs_scale_blocks=record.lhs_scale.shape[1],
            rhs_scale_blocks=record.rhs_scale.shape[1],
            product_n=product,
            sums_on_tensor_cores=sums_on_tensor_cores(record) and not split_by_columns,
            split_by_columns=split_by_columns,
            dynamic_schedule=params.dynamic_schedule,
        ),
    )


def columns_share_scales(scales: jax.Array, product_n: int) -> jax.Array:
    """Returns whether all columns of every product share their scale, int32 [1], as with matrix scales of 128 x 128.

    Args:
        scales: Float32 [E, blocks, N].
        product_n: Columns per product.
    """
    size = scales.shape[2]
    scales = jnp.pad(scales, ((0, 0), (0, 0), (0, -size % product_n)), mode="edge")
    products = scales.reshape(*scales.shape[:2], -1, product_n)
    return jnp.all(products == products[..., :1]).astype(jnp.int32)[None]


def fp8_shared_memory_bytes(params: HopperFp8) -> int:
    """Returns shared memory of the kernel, without barriers."""
    scales = (params.stages + 1) * params.block_n * 4
    if params.split_by_columns:
        scales += params.stages * BLOCK_M * SCALE_BLOCKS_PER_COPY * 4
    return (
        params.stages * (BLOCK_M + params.block_n) * FP8_CONTRACTED_PER_STEP
        + scales
        + CONSUMER_WARPGROUPS * params.output_buffers * WGMMA_M * SWIZZLED_ROW_BYTES
    )


def make_gated_spec(record: GatedGroupedMatmul, params: HopperGated) -> GroupedSpec:
    """Returns the constants of the kernel.

    Raises:
        ValueError: A tile size is not valid for the kernel.
    """
    activation_constants = _make_activation_constants(record, params)
    block_sizes = tuple(size // activation_constants.matrix_columns_per_output_column for size in (128, 256))
    if params.block_n not in block_sizes:
        without = "" if record.gated else " without a gate"
        raise ValueError(
            f"cfg: got block_n={params.block_n}{without}, the gated Mosaic GPU kernel wants {block_sizes[0]} or "
            f"{block_sizes[1]}"
        )
    product = plain_product_record(record)
    # Shared memory has the gate's and the factor's columns of a tile.
    matrix_columns = activation_constants.matrix_columns_per_output_column * params.block_n
    tile = HopperGrouped(
        **TileOptions(matrix_columns, params.stages, params.output_buffers, params.group_m).config_fields
    )
    plain_spec = make_spec(product, tile, record.lhs.dtype)
    return dataclasses.replace(
        plain_spec,
        num_columns=plain_spec.num_columns // activation_constants.matrix_columns_per_output_column,
        tile=dataclasses.replace(tile, block_n=params.block_n),
        activation_constants=activation_constants,
    )


def _make_activation_constants(record: GatedGroupedMatmul, params: HopperGated) -> ActivationConstants:
    """Returns the constants of a record's activation and of its columns."""
    layout = GateColumnOrder.GATE_AND_FACTOR_HALVES if record.gated else GateColumnOrder.NO_GATE
    if record.interleaved and not record.transpose_rhs:
        layout = GateColumnOrder.INTERLEAVED
    return ActivationConstants(
        activation=record.activation,
        alpha=record.alpha,
        beta=record.beta,
        limit=record.limit,
        gate_column_order=layout,
        views_interleaved_rows_as_pairs=record.interleaved and record.transpose_rhs,
        has_bias=record.rhs_bias is not None,
        gathers_rows=record.indices is not None,
        single_warpgroup=params.single_warpgroup,
    )
