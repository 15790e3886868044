"""Copies the panels of 64 columns that a step of a gated product multiplies, one after the other.

    halves           gate 0 | factor 0 | gate 1 | factor 1 ...     from the two halves of a matrix's columns
    interleaved      pairs 0 | pairs 1 | ...                       gate and factor interleaved within a panel
    no gate          columns 0 | columns 1 | ...

Transposed matrices [columns, contracted] have panels of 64 rows. If their rows are interleaved, the kernel has a view
[F, 2 contracted] of them, the row of the gate and then that of its factor: panels of each are copied as from halves.
"""

from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from ejkernel_pallas.gpu.grouped_matmul.kernels.call import Call
from ejkernel_pallas.gpu.grouped_matmul.kernels.row_tiles import OutputTile
from ejkernel_pallas.gpu.grouped_matmul.spec import GateColumnOrder
from ejkernel_pallas.gpu.hopper.sizes import SWIZZLE_COLUMNS


def copy_gate_panels(call: Call, tile: OutputTile, k_start: Any, slot: Any) -> None:
    """Copies a step's panels, of the contracted elements from `k_start` on."""
    spec, shared = call.spec, call.shared_memory
    full, count = shared.operands_full.at[slot], spec.panels_per_stage
    begin = tile.first_column
    if spec.may_split_last_tiles:
        begin = begin + jnp.maximum(tile.column_half, 0) * (spec.tile.block_n // 2)
    for number in range(count):
        source, target = _panel_ref(call, tile.matrix_index, begin, number, k_start), shared.b.at[slot, number]

        def copy_panel(source: Any = source, target: Any = target) -> None:
            plgpu.copy_gmem_to_smem(source, target, full)

        if spec.may_split_last_tiles and number >= count // 2:
            # Half a tile has half of the panels, but the mbarrier counts all of them.
            pl.when(tile.column_half < 0)(copy_panel)
            pl.when(tile.column_half >= 0)(lambda: plgpu.barrier_arrive(full))
        else:
            copy_panel()


def first_matrix_column_of_panel(call: Call, column: Any, panel_index: int) -> Any:
    """Returns the first column of the matrix in panel `panel_index` of output columns from `column` on. The panel's
    bias has the same column.
    """
    activation_constants = call.spec.activation_constants
    assert activation_constants is not None  # set for the gated product
    if activation_constants.gate_column_order is GateColumnOrder.GATE_AND_FACTOR_HALVES:
        block, other = divmod(panel_index, 2)
        return column + (block * SWIZZLE_COLUMNS + other * call.spec.num_columns)
    return activation_constants.matrix_columns_per_output_column * column + panel_index * SWIZZLE_COLUMNS


def _panel_ref(call: Call, matrix: Any, column: Any, panel_index: int, k_start: Any) -> Any:
    """Returns the reference to a panel in device memory."""
    spec, rhs = call.spec, call.operands["rhs"]
    activation_constants, k_slice = spec.activation_constants, pl.ds(k_start, spec.contracted_per_step)
    assert activation_constants is not None  # set for the gated product
    if activation_constants.views_interleaved_rows_as_pairs:
        block, other = divmod(panel_index, 2)
        k_slice = pl.ds(other * spec.contracted_size + k_start, spec.contracted_per_step)
        return rhs.at[matrix, pl.ds(column + block * SWIZZLE_COLUMNS, SWIZZLE_COLUMNS), k_slice]
    columns = pl.ds(first_matrix_column_of_panel(call, column, panel_index), SWIZZLE_COLUMNS)
    return rhs.at[matrix, columns, k_slice] if spec.matrices_are_transposed else rhs.at[matrix, k_slice, columns]
