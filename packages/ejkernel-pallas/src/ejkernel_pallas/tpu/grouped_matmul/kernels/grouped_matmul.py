"""Multiplies rows by the matrices of their groups: the output, and the gradient of lhs.

    grid: (tiles of columns, work items, tiles of contracted elements); an item is a tile of rows and one group's matrix

        rows [block_m, block_k] ◄── double buffer ─┐
        matrices [block_k, block_n] ◄ double buffer┴─► products of parts ──► acc [block_m, block_n]
        after the last block_k: acc, scaled, + bias, + existing, gated ──► the item's rows of output

A tile of rows that several groups share is computed once for each; it stays in VMEM in between, and each item computes
and writes the subtiles that contain rows of its matrix.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.arithmetic import cdiv
from ejkernel.families.gated_grouped_matmul import activate_products, activated_gate_times_factor
from ejkernel.families.grouped_matmul import GroupedMatmul
from ejkernel_pallas.tpu.grouped_matmul.kernels.refs import RowsRefs
from ejkernel_pallas.tpu.grouped_matmul.plan import (
    BEFORE_ALL_GROUPS_FLAG,
    FIRST_ITEM_FLAG,
    HAS_WORK_FLAG,
    WHOLE_TILE_FLAG,
    WorkItem,
    make_coordinate_map,
    read_item,
    work_list_by_row_tiles,
)
from ejkernel_pallas.tpu.grouped_matmul.spec import (
    COLUMNS_PER_PRODUCT,
    Gate,
    GateLayout,
    GroupedSpec,
    pad_scales_to_sublanes,
    spread_scales_over_tile,
)
from ejkernel_pallas.tpu.mosaic import vectors
from ejkernel_pallas.tpu.mosaic.division import divide
from ejkernel_pallas.tpu.mosaic.launch import KernelCall, Operand, launch, vmem_limit_bytes
from ejkernel_pallas.tpu.mosaic.loops import fori_loop
from ejkernel_pallas.tpu.mosaic.offsets import opaque_offset
from ejkernel_pallas.tpu.mosaic.vectors import LANES, SUBLANES, deinterleave, matrix_product, repeat_lanes, zero_outside


class TilePosition(NamedTuple):
    """The position of a tile in the product.

    Attributes:
        column_tile: Index of the tile of columns.
        contracted_tile: Index of the tile of contracted elements.
        opaque_zero: A zero that the compiler cannot fold.
    """

    column_tile: Any
    contracted_tile: Any
    opaque_zero: Any


class SubTile(NamedTuple):
    """A subtile of the output.

    Attributes:
        first_row: Index of the first row in the tile; may be traced.
        num_rows: The number of rows.
        first_column: Index of the first column in the tile; may be traced.
        num_columns: The number of columns.
    """

    first_row: Any
    num_rows: int
    first_column: Any
    num_columns: int

    @property
    def row_slice(self) -> Any:
        """Returns the rows as a slice of the tile."""
        return pl.ds(self.first_row, self.num_rows)

    @property
    def column_slice(self) -> Any:
        """Returns the columns as a slice of the tile."""
        return pl.ds(self.first_column, self.num_columns)


def multiply(
    record: GroupedMatmul, rows: jax.Array, spec: GroupedSpec, epilogue_arrays: dict[str, jax.Array], dtype: Any
) -> jax.Array:
    """Multiplies every row by the matrix of its group.

    Args:
        record: Has the matrices, their scales, and the group sizes.
        rows: [M, K] of the product.
        spec: The kernel's constants.
        epilogue_arrays: Arrays that are added to the products: `"bias"` [E, 1, N] float32 and `"existing_output"` [M,
            N]; and `"row_has_token"` float32 [M] for a gated product.
        dtype: Dtype of the result.

    Returns:
        [M, N]; unassigned rows are `"existing_output"`, or 0.
    """
    work, (height, _, width) = work_list_by_row_tiles(record, spec.blocks.rows), spec.blocks
    array = jax.ShapeDtypeStruct((spec.num_rows, spec.num_columns), dtype)
    scratch: dict[str, Any] = {}
    if spec.keeps_sums_in_memory:
        scratch["acc"] = pltpu.VMEM((height, _num_accumulator_lanes(spec)), jnp.float32)
        if spec.gate is not None and spec.gate.layout is GateLayout.TWO_HALF_BLOCKS:
            scratch["factor_acc"] = scratch["acc"]
        if spec.stages_last_product:
            scratch["staged_last_product"] = pltpu.VMEM((height, COLUMNS_PER_PRODUCT), jnp.float32)
    if spec.stages_row_mask:
        scratch["row_mask"] = pltpu.VMEM((spec.subtile_rows, LANES), jnp.int32)
    inputs = _input_operands(record, rows, spec, epilogue_arrays)
    outputs = {"output": Operand(array, (height, width), lambda v, n, k: (v.row_tile, n))}
    results = launch(
        KernelCall(
            name=_kernel_name(spec),
            kernel=functools.partial(_kernel, spec=spec),
            refs=RowsRefs,
            grid=(cdiv(spec.num_columns, width), work.num_items, spec.num_contracted_tiles),
            # Only columns are parallel: items that share a tile of rows are consecutive, since they write to one block.
            num_parallel_axes=1,
            scalar_tables={"work_items": work.table},
            inputs=inputs,
            outputs=outputs,
            scratch=scratch,
            coordinate_map=make_coordinate_map(1),
            vmem_limit=vmem_limit_bytes((*inputs.values(), *outputs.values()), scratch),
        )
    )
    return results["output"]


def _kernel_name(spec: GroupedSpec) -> str:
    if spec.gate is not None:
        return "ejkernel_gated_grouped_matmul"
    return "ejkernel_grouped_matmul_backward_rows" if spec.is_lhs_gradient else "ejkernel_grouped_matmul"


def _num_accumulator_lanes(spec: GroupedSpec) -> int:
    """Returns the lanes of a block's sums and of its bias; of interleaved ones, whole pairs of lane groups."""
    pairs = spec.gate is not None and spec.gate.layout is GateLayout.INTERLEAVED
    return cdiv(spec.block_columns, 2 * LANES) * 2 * LANES if pairs else spec.block_columns


def _input_operands(
    record: GroupedMatmul, rows: jax.Array, spec: GroupedSpec, epilogue_arrays: dict[str, jax.Array]
) -> dict[str, Operand]:
    (height, depth, _), width = spec.blocks, spec.block_columns
    inputs = {
        "rows": Operand(
            rows, (height, depth), lambda v, n, k: (v.loaded_row_tile, _contracted_tile_of_item(v, k, spec))
        )
    }
    if spec.transposes_matrices:
        block, index = (None, width, depth), lambda v, n, k: (v.matrix_index, n, _contracted_tile_of_item(v, k, spec))
    else:
        block, index = (None, depth, width), lambda v, n, k: (v.matrix_index, _contracted_tile_of_item(v, k, spec), n)
    inputs["matrices"] = Operand(record.rhs, block, index)
    if record.rhs_scale is not None:
        inputs["scales"] = _scale_operand(pad_scales_to_sublanes(record.rhs_scale), spec)
    if "bias" in epilogue_arrays:
        bias, lanes = epilogue_arrays["bias"], _num_accumulator_lanes(spec)
        if lanes > width:
            bias = jnp.pad(bias, ((0, 0), (0, 0), (0, lanes - width)))
        inputs["bias"] = Operand(bias, (None, 1, lanes), lambda v, n, k: (v.matrix_index, 0, n))
    if "existing_output" in epilogue_arrays:
        inputs["existing_output"] = Operand(
            epilogue_arrays["existing_output"], (height, width), lambda v, n, k: (v.row_tile, n)
        )
    if "row_has_token" in epilogue_arrays:
        flags = jnp.pad(epilogue_arrays["row_has_token"], (0, -spec.num_rows % height)).reshape(-1, 1, height)
        inputs["row_has_token"] = Operand(flags, (None, 1, height), lambda v, n, k: (v.row_tile, 0, 0))
    if spec.gate is not None and spec.gate.layout is GateLayout.TWO_HALF_BLOCKS:
        for name in ("matrices", "bias"):
            if name in inputs:
                inputs[f"factor_{name}"] = _factor_half_operand(inputs[name], cdiv(spec.num_columns, width))
    return inputs


def _factor_half_operand(operand: Operand, blocks_per_half: int) -> Operand:
    """Returns the same block of a matrix's, or of a bias's, other half, `blocks_per_half` blocks of columns later."""
    return dataclasses.replace(operand, index_map=lambda v, n, k: operand.index_map(v, n + blocks_per_half, k))


def _contracted_tile_of_item(work_item: WorkItem, k: Any, spec: GroupedSpec) -> Any:
    """Returns the tile of contracted elements. An item without work gets the tile of a neighbouring item, so that
    nothing is copied.
    """
    return jnp.where(
        work_item.has(HAS_WORK_FLAG),
        k,
        jnp.where(work_item.has(BEFORE_ALL_GROUPS_FLAG), 0, spec.num_contracted_tiles - 1),
    )


def _scale_operand(scales: jax.Array, spec: GroupedSpec) -> Operand:
    size = spec.blocks.contracted if spec.is_lhs_gradient else spec.blocks.columns
    block = (None, scales.shape[1], size)
    if spec.is_lhs_gradient:
        return Operand(scales, block, lambda v, n, k: (v.matrix_index, 0, _contracted_tile_of_item(v, k, spec)))
    return Operand(scales, block, lambda v, n, k: (v.matrix_index, 0, n))


def _kernel(refs: RowsRefs, *, spec: GroupedSpec) -> None:
    """Processes one tile of contracted elements of one work item.

    Args:
        refs: Blocks and scratch memory.
        spec: The kernel's constants.
    """
    v = read_item(refs.work_items, pl.program_id(1))
    at = TilePosition(pl.program_id(0), pl.program_id(2), v.opaque_zero)
    whole, partial = v.has(WHOLE_TILE_FLAG), (v.flags & (HAS_WORK_FLAG | WHOLE_TILE_FLAG)) == HAS_WORK_FLAG
    last = at.contracted_tile == spec.num_contracted_tiles - 1
    if spec.num_contracted_tiles > 1:

        @pl.when(v.has(HAS_WORK_FLAG) & (at.contracted_tile == 0))
        def _() -> None:
            for product_refs in refs.refs_per_product:
                product_refs.acc[...] = jnp.zeros_like(product_refs.acc)

    if refs.acc is not None:
        # Only the last tile of contracted elements extends past them; the others need no mask.
        for when, masks_contracted_tail in (
            ((~last, False), (last, True)) if spec.has_partial_contracted_tile else ((True, False),)
        ):
            add = functools.partial(
                _add_subtile_products_to_each_sum, refs, at, spec=spec, masks_contracted_tail=masks_contracted_tail
            )
            pl.when(whole & when)(functools.partial(_for_each_column_subtile, spec, spec.block_columns, 0, add))
            pl.when(partial & when)(functools.partial(_for_each_subtile, spec, spec.block_columns, v, add))
    write = functools.partial(_write_subtile, refs, at, spec=spec)
    width = spec.blocks.columns
    pl.when(whole & last)(functools.partial(_for_each_column_subtile, spec, width, 0, write))
    pl.when(v.has(FIRST_ITEM_FLAG) & ~whole & last)(functools.partial(_write_unassigned_rows, refs))
    pl.when(partial & last)(functools.partial(_for_each_subtile, spec, width, v, functools.partial(write, work_item=v)))


def _for_each_column_subtile(
    spec: GroupedSpec, total_columns: int, row: Any, process_subtile: Callable[[SubTile], None], rows: int | None = None
) -> None:
    """Calls `process_subtile` with subtiles of `total_columns` columns in total that have all or `rows` rows, and few
    columns each, whose sums fit registers.
    """
    height = spec.blocks.rows

    def process_column_subtile(n: Any, carry: Any) -> Any:
        process_subtile(
            SubTile(
                row, rows or height, pl.multiple_of(n * COLUMNS_PER_PRODUCT, COLUMNS_PER_PRODUCT), COLUMNS_PER_PRODUCT
            )
        )
        return carry

    looped_subtiles = 0 if spec.unrolls_products else total_columns // COLUMNS_PER_PRODUCT
    if looped_subtiles:
        lax.fori_loop(np.int32(0), np.int32(looped_subtiles), process_column_subtile, np.int32(0))
    for column in range(looped_subtiles * COLUMNS_PER_PRODUCT, total_columns, COLUMNS_PER_PRODUCT):
        process_subtile(SubTile(row, rows or height, column, min(COLUMNS_PER_PRODUCT, total_columns - column)))


def _for_each_subtile(
    spec: GroupedSpec, total_columns: int, work_item: WorkItem, process_subtile: Callable[[SubTile], None]
) -> None:
    """Calls `process_subtile` with subtiles that cover all rows of the item and few rows of other items."""
    rows = spec.subtile_rows

    def process_row_subtile(n: Any, carry: Any) -> Any:
        _for_each_column_subtile(spec, total_columns, pl.multiple_of(n * rows, rows), process_subtile, rows)
        return carry

    fori_loop(
        divide(work_item.first_row, rows),
        divide(work_item.end_row + (rows - 1), rows),
        process_row_subtile,
        np.int32(0),
    )


def _add_subtile_products_to_each_sum(
    refs: RowsRefs, tile_position: TilePosition, subtile: SubTile, spec: GroupedSpec, masks_contracted_tail: bool
) -> None:
    """Adds the products of a subtile to each of the tile's sums: those of gate and factor, or one."""
    for product_refs in refs.refs_per_product:
        _add_subtile_products(product_refs, tile_position, subtile, spec, masks_contracted_tail)


def _add_subtile_products(
    refs: RowsRefs, tile_position: TilePosition, subtile: SubTile, spec: GroupedSpec, masks_contracted_tail: bool
) -> None:
    """Adds the products of a subtile; with `masks_contracted_tail`, tiles extend past the contracted elements."""
    for start, size in spec.contracted_ranges:
        partial_sum = _subtile_product(refs, tile_position, subtile, spec, (start, size), masks_contracted_tail)
        if start == 0 and spec.num_contracted_tiles == 1:
            row = (
                opaque_offset(subtile.first_row, SUBLANES, tile_position.opaque_zero)
                if spec.reloads_first_product
                else subtile.first_row
            )
            refs.acc[pl.ds(row, subtile.num_rows), subtile.column_slice] = partial_sum
            continue
        if spec.stages_last_product and (start, size) == spec.contracted_ranges[-1]:
            last = refs.staged_last_product.at[subtile.row_slice, : subtile.num_columns]
            last[...] = partial_sum
            partial_sum = last[...]
        refs.acc[subtile.row_slice, subtile.column_slice] += partial_sum


def _subtile_product(
    refs: RowsRefs,
    tile_position: TilePosition,
    subtile: SubTile,
    spec: GroupedSpec,
    contracted_range: tuple[int, int],
    masks_contracted_tail: bool = False,
) -> jax.Array:
    """Returns the product over a piece of the contracted elements."""
    start, size = contracted_range
    inner = slice(start, start + size)
    row = subtile.first_row
    if spec.keeps_sums_in_memory:  # loads and stores of sums need the registers that would keep rows for other columns
        row = opaque_offset(row, subtile.first_column, tile_position.opaque_zero)
    rows = refs.rows[pl.ds(row, subtile.num_rows), inner]
    matrix = (
        refs.matrices[subtile.column_slice, inner]
        if spec.transposes_matrices
        else refs.matrices[inner, subtile.column_slice]
    )
    if refs.scales is not None and not spec.applies_scales_to_products:
        matrix = matrix.astype(jnp.float32) * _matrix_scales(refs, tile_position, subtile, spec, contracted_range)
    if masks_contracted_tail:
        # In both operands: past the end either may hold NaN, and 0 times NaN is NaN.
        left = spec.num_contracted - tile_position.contracted_tile * spec.blocks.contracted - start
        rows = zero_outside(rows, 0, left, 1)
        matrix = zero_outside(matrix, 0, left, 1 if spec.transposes_matrices else 0)
    pair = rows.astype(spec.operand_dtype), matrix.astype(spec.operand_dtype)
    partial_sum = matrix_product(*pair, (1, 1 if spec.transposes_matrices else 0), spec.precision)
    if refs.scales is not None and spec.applies_scales_to_products and not spec.applies_scale_to_sum:
        block = divide(tile_position.contracted_tile * spec.blocks.contracted + start, spec.contracted_per_scale)
        partial_sum = partial_sum * refs.scales[pl.ds(block, 1), subtile.column_slice]
    return partial_sum


def _matrix_scales(
    refs: RowsRefs, tile_position: TilePosition, subtile: SubTile, spec: GroupedSpec, contracted_range: tuple[int, int]
) -> jax.Array:
    """Returns the scales of a matrix, in the shape of its subtile."""
    columns_first = spec.transposes_matrices != spec.is_lhs_gradient
    if spec.is_lhs_gradient:
        scales = refs.scales[:, slice(contracted_range[0], contracted_range[0] + contracted_range[1])]
        return spread_scales_over_tile(
            scales,
            tile_position.column_tile * spec.blocks.columns + subtile.first_column,
            subtile.num_columns,
            spec,
            columns_first,
        )
    first = tile_position.contracted_tile * spec.blocks.contracted + contracted_range[0]
    return spread_scales_over_tile(
        refs.scales[:, subtile.column_slice], first, contracted_range[1], spec, columns_first
    )


def _write_unassigned_rows(refs: RowsRefs) -> None:
    """Writes the existing output, or zeros, to the rows of a tile, for rows that no group has."""
    output = refs.output
    if refs.existing_output is not None:
        output[...] = refs.existing_output[...].astype(output.dtype)
    else:
        output[...] = jnp.zeros_like(output)


def _write_subtile(
    refs: RowsRefs, tile_position: TilePosition, subtile: SubTile, spec: GroupedSpec, work_item: WorkItem | None = None
) -> None:
    """Writes a subtile of the output; with an item, only its rows."""
    total = (
        _subtile_sum(refs, tile_position, subtile, spec)
        if spec.gate is None
        else _gated_subtile_output(refs, tile_position, subtile, spec, spec.gate)
    )
    output = refs.output
    if work_item is not None:
        # Other rows keep what their groups' items wrote: the block stays in VMEM until the tile of rows changes.
        mask = _group_row_mask(refs, tile_position, subtile, spec, work_item)
        total = jnp.where(mask, total, output[subtile.row_slice, subtile.column_slice].astype(jnp.float32))
    output[subtile.row_slice, subtile.column_slice] = total.astype(output.dtype)


def _subtile_sum(refs: RowsRefs, tile_position: TilePosition, subtile: SubTile, spec: GroupedSpec) -> jax.Array:
    """Returns the sum of a subtile, with bias and existing output."""
    total = (
        refs.acc[subtile.row_slice, subtile.column_slice]
        if refs.acc is not None
        else _subtile_product(refs, tile_position, subtile, spec, spec.contracted_ranges[0])
    )
    if spec.applies_scale_to_sum:
        total = total * refs.scales[:1, subtile.column_slice]
    if refs.bias is not None:
        total = total + refs.bias[:, subtile.column_slice]
    if refs.existing_output is not None:
        total = total + refs.existing_output[subtile.row_slice, subtile.column_slice].astype(jnp.float32)
    return total


def _gated_subtile_output(
    refs: RowsRefs, tile_position: TilePosition, subtile: SubTile, spec: GroupedSpec, gate: Gate
) -> jax.Array:
    """Returns a subtile of the output: the activation of sums, times their factors where there is a gate."""
    if gate.layout is GateLayout.UNGATED:
        output = activate_products(gate, _subtile_sum(refs, tile_position, subtile, spec))
    elif gate.layout is GateLayout.TWO_HALF_BLOCKS:
        output = activated_gate_times_factor(
            gate, *(_subtile_sum(product_refs, tile_position, subtile, spec) for product_refs in refs.refs_per_product)
        )
    elif gate.layout is GateLayout.ALL_COLUMNS_BLOCK:
        factor = subtile._replace(first_column=subtile.first_column + spec.num_columns)
        output = activated_gate_times_factor(
            gate, _subtile_sum(refs, tile_position, subtile, spec), _subtile_sum(refs, tile_position, factor, spec)
        )
    else:
        lanes = cdiv(subtile.num_columns, LANES) * 2 * LANES
        pairs = _subtile_sum(
            refs, tile_position, subtile._replace(first_column=subtile.first_column * 2, num_columns=lanes), spec
        )
        output = activated_gate_times_factor(gate, *(x[:, : subtile.num_columns] for x in deinterleave(pairs)))
    if refs.row_has_token is not None:
        row_has_token = repeat_lanes(
            vectors.row_to_column(refs.row_has_token[:, pl.ds(subtile.first_row, subtile.num_rows)]), output.shape[1]
        )
        output = jnp.where(row_has_token != 0, output, 0.0)
    return output


def _group_row_mask(
    refs: RowsRefs, tile_position: TilePosition, subtile: SubTile, spec: GroupedSpec, work_item: WorkItem
) -> jax.Array:
    """Returns which rows of a subtile belong to the item, over all of its columns; the same for all subtiles of
    these rows.
    """
    if not spec.stages_row_mask:
        row = subtile.first_row + lax.broadcasted_iota(jnp.int32, (subtile.num_rows, subtile.num_columns), 0)
        return (row >= work_item.first_row) & (row < work_item.end_row)
    row_mask = refs.row_mask
    if subtile.first_column == 0:
        row = subtile.first_row + lax.broadcasted_iota(jnp.int32, row_mask.shape, 0)
        row_mask[...] = jnp.where((row >= work_item.first_row) & (row < work_item.end_row), 1, 0)
    mask = row_mask[pl.ds(opaque_offset(0, subtile.first_column, tile_position.opaque_zero), subtile.num_rows)]
    return jnp.concatenate([mask] * cdiv(subtile.num_columns, LANES), axis=1)[:, : subtile.num_columns] != 0
