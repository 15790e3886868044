"""Computes sums over the rows of a group: the gradients of its matrix, scales and bias.

grid: (tiles of lanes, tiles of sublanes, work items); a work item is a tile of rows of one group

    rows [block_m, block_k] ◄── double buffer ─┐   rows of other groups are 0, in scratch
    cotangent [block_m, block_n] ◄── the same ─┴─► rows^T cotangent ──► acc [block_k, block_n]
    after a group's last item: acc, scaled ──► rhs, rhs_scale, rhs_bias
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.arithmetic import cdiv
from ejkernel.families.grouped_matmul import GroupedMatmul
from ejkernel_pallas.tpu.grouped_matmul.kernels.refs import MatricesRefs
from ejkernel_pallas.tpu.grouped_matmul.plan import (
    FIRST_ITEM_FLAG,
    HAS_WORK_FLAG,
    LAST_ITEM_FLAG,
    WHOLE_TILE_FLAG,
    WorkItem,
    make_coordinate_map,
    read_item,
    work_list_by_matrices,
)
from ejkernel_pallas.tpu.grouped_matmul.spec import (
    COLUMNS_PER_PRODUCT,
    GroupedSpec,
    pad_scales_to_sublanes,
    scale_block_membership,
    spread_scales_over_tile,
)
from ejkernel_pallas.tpu.mosaic.division import divide
from ejkernel_pallas.tpu.mosaic.launch import KernelCall, Operand, launch, vmem_limit_bytes
from ejkernel_pallas.tpu.mosaic.loops import fori_loop
from ejkernel_pallas.tpu.mosaic.offsets import opaque_offset
from ejkernel_pallas.tpu.mosaic.vectors import SUBLANES, matrix_product, zero_outside

ROWS_PER_COPY = 64
"""Rows per copy to scratch."""


def matrix_gradients(
    record: GroupedMatmul, cotangent: jax.Array, spec: GroupedSpec, grad_fields: frozenset[str]
) -> dict[str, jax.Array]:
    """Returns the gradients of matrices, scales and biases.

    Args:
        record: The record.
        cotangent: [M, N] of the output.
        spec: The kernel's constants.
        grad_fields: Any of `"rhs"`, `"rhs_scale"` and `"rhs_bias"`.

    Returns:
        The requested gradients, in the shapes and dtypes of their fields.
    """
    work, products = work_list_by_matrices(record, spec.blocks.rows), bool(grad_fields & {"rhs", "rhs_scale"})
    # A bias alone needs one tile of contracted elements, of which none is read.
    num_contracted_tiles, n_tiles = (
        spec.num_contracted_tiles if products else 1,
        cdiv(spec.num_columns, spec.blocks.columns),
    )
    outputs, scratch = _output_operands_and_scratch(record, cotangent.dtype, spec, num_contracted_tiles, grad_fields)
    inputs = (
        _input_operands(record, cotangent, spec, grad_fields)
        if products
        else {"cotangent": _cotangent_operand(cotangent, spec)}
    )
    gradients = launch(
        KernelCall(
            name="ejkernel_grouped_matmul_backward_matrices",
            kernel=functools.partial(_kernel, spec=spec),
            refs=MatricesRefs,
            grid=(num_contracted_tiles, n_tiles, work.num_items)
            if spec.transposes_matrices
            else (n_tiles, num_contracted_tiles, work.num_items),
            # Tiles of a matrix may go to different cores; the items of a tile add to one accumulator.
            num_parallel_axes=1,
            scalar_tables={"work_items": work.table},
            inputs=inputs,
            outputs=outputs,
            scratch=scratch,
            coordinate_map=make_coordinate_map(2),
            vmem_limit=vmem_limit_bytes((*inputs.values(), *outputs.values()), scratch),
        )
    )
    if "rhs_scale" in gradients:
        # The rows of one scale may be in two tiles of contracted elements, each of which has written a partial sum.
        gradients["rhs_scale"] = gradients["rhs_scale"].sum(axis=0)[:, : spec.scales_per_matrix, None]
    if "rhs_bias" in gradients:
        gradients["rhs_bias"] = gradients["rhs_bias"][0]
    return {name: x.astype(getattr(record, name).dtype) for name, x in gradients.items()}


def _index_map(
    spec: GroupedSpec, index_map: Callable[[WorkItem, Any, Any], tuple[Any, ...]]
) -> Callable[[WorkItem, Any, Any], Any]:
    """Returns an index map from work item, tile of contracted elements and tile of columns; lanes are the grid's
    first axis.
    """
    return index_map if spec.transposes_matrices else lambda v, n, k: index_map(v, k, n)


def _cotangent_operand(cotangent: jax.Array, spec: GroupedSpec) -> Operand:
    return Operand(
        cotangent, (spec.blocks.rows, spec.blocks.columns), _index_map(spec, lambda v, k, n: (v.row_tile, n))
    )


def _matrix_operand(array: Any, spec: GroupedSpec) -> Operand:
    """Returns an array of matrices, by tiles."""
    _, depth, width = spec.blocks
    if spec.transposes_matrices:
        return Operand(array, (None, width, depth), _index_map(spec, lambda v, k, n: (v.matrix_index, n, k)))
    return Operand(array, (None, depth, width), _index_map(spec, lambda v, k, n: (v.matrix_index, k, n)))


def _input_operands(
    record: GroupedMatmul, cotangent: jax.Array, spec: GroupedSpec, grad_fields: frozenset[str]
) -> dict[str, Operand]:
    """Returns what the kernel of the matrices' gradients reads: the operands of its products, and of the epilogue."""
    rows = (spec.blocks.rows, spec.blocks.contracted)
    inputs = {
        "cotangent": _cotangent_operand(cotangent, spec),
        "rows": Operand(record.lhs, rows, _index_map(spec, lambda v, k, n: (v.row_tile, k))),
    }
    if record.rhs_scale is not None:
        scales = pad_scales_to_sublanes(record.rhs_scale)
        block = (None, scales.shape[1], spec.blocks.columns)
        inputs["scales"] = Operand(scales, block, _index_map(spec, lambda v, k, n: (v.matrix_index, 0, n)))
    if "rhs_scale" in grad_fields:
        inputs["matrices"] = _matrix_operand(record.rhs, spec)
    return inputs


def _output_operands_and_scratch(
    record: GroupedMatmul, cotangent: Any, spec: GroupedSpec, num_contracted_tiles: int, grad_fields: frozenset[str]
) -> tuple[dict[str, Operand], dict[str, Any]]:
    """Returns outputs and scratch memory."""
    matrices, width = record.rhs.shape[0], spec.blocks.columns
    outputs: dict[str, Operand] = {}
    scratch: dict[str, Any] = {}
    if "rhs" in grad_fields:
        outputs["rhs"] = _matrix_operand(jax.ShapeDtypeStruct(record.rhs.shape, record.rhs.dtype), spec)
    if record.rhs_scale is not None and "rhs_scale" in grad_fields:
        blocks = cdiv(spec.scales_per_matrix, SUBLANES) * SUBLANES
        array = jax.ShapeDtypeStruct((num_contracted_tiles, matrices, blocks, spec.num_columns), jnp.float32)
        index = _index_map(spec, lambda v, k, n: (k, v.matrix_index, 0, n))
        outputs["rhs_scale"] = Operand(array, (None, None, blocks, width), index)
    if grad_fields & {"rhs", "rhs_scale"}:
        tile = (width, spec.blocks.contracted) if spec.transposes_matrices else (spec.blocks.contracted, width)
        scratch["acc"] = pltpu.VMEM(tile, jnp.float32)
        scratch["group_rows_buffer"] = pltpu.VMEM((spec.subtile_rows, spec.blocks.contracted), record.lhs.dtype)
        scratch["group_cotangent_buffer"] = pltpu.VMEM((spec.subtile_rows, width), cotangent)
    if "rhs_bias" in grad_fields:
        # Every tile of contracted elements writes the same sums, maybe from different cores: each has its own block.
        array = jax.ShapeDtypeStruct((num_contracted_tiles, matrices, 1, spec.num_columns), jnp.float32)
        outputs["rhs_bias"] = Operand(
            array, (None, None, 1, width), _index_map(spec, lambda v, k, n: (k, v.matrix_index, 0, n))
        )
        scratch["bias_acc"] = pltpu.VMEM((1, width), jnp.float32)
    return outputs, scratch


def _kernel(refs: MatricesRefs, *, spec: GroupedSpec) -> None:
    """Processes one work item: adds the products of a tile of rows and their cotangents to a tile of the matrix's
    gradient.

    Args:
        refs: Blocks and scratch memory.
        spec: The kernel's constants.
    """
    v = read_item(refs.work_items, pl.program_id(2))

    @pl.when(v.has(FIRST_ITEM_FLAG))
    def _() -> None:
        for acc in (refs.acc, refs.bias_acc):
            if acc is not None:
                acc[...] = jnp.zeros_like(acc)

    pl.when(v.has(WHOLE_TILE_FLAG))(lambda: _add_item_products(refs, v, spec, False))
    pl.when((v.flags & (HAS_WORK_FLAG | WHOLE_TILE_FLAG)) == HAS_WORK_FLAG)(
        lambda: _add_item_products(refs, v, spec, True)
    )
    first = pl.program_id(0 if spec.transposes_matrices else 1) * spec.blocks.contracted
    pl.when(v.has(LAST_ITEM_FLAG))(lambda: _store_tile_gradients(refs, first, spec))


def _add_item_products(
    refs: MatricesRefs, work_item: WorkItem, spec: GroupedSpec, has_rows_of_other_matrices: bool
) -> None:
    """Adds the contribution of rows; with `has_rows_of_other_matrices`, some rows of the tile are not this matrix's."""
    rows = spec.blocks.rows
    if refs.bias_acc is not None:
        cotangent = refs.cotangent[...].astype(jnp.float32)
        cotangent = (
            zero_outside(cotangent, work_item.first_row, work_item.end_row, 0)
            if has_rows_of_other_matrices
            else cotangent
        )
        refs.bias_acc[...] += jnp.sum(cotangent, axis=0, keepdims=True)
    if refs.acc is None:
        return
    if not has_rows_of_other_matrices:
        deep = rows if spec.mxu_accumulates else math.gcd(rows, COLUMNS_PER_PRODUCT)
        for row in range(0, rows, deep):
            _add_products(refs, refs.rows, refs.cotangent, (row, deep), work_item.opaque_zero, spec)
        return
    deep = spec.subtile_rows

    def add_row_subtile_products(n: Any, carry: Any) -> Any:
        row = pl.multiple_of(n * deep, deep)
        # Copied to scratch instead of masked during the products, which would take registers that the sums need.
        _copy_group_rows(refs, work_item, row, deep)
        _add_products(refs, refs.group_rows_buffer, refs.group_cotangent_buffer, (0, deep), work_item.opaque_zero, spec)
        return carry

    # Loops instead of conditions, which a compiler may turn into products whose results are not used.
    fori_loop(
        divide(work_item.first_row, deep),
        divide(work_item.end_row + (deep - 1), deep),
        add_row_subtile_products,
        np.int32(0),
    )


def _copy_group_rows(refs: MatricesRefs, work_item: WorkItem, first_row: Any, num_rows: int) -> None:
    """Copies some rows, with 0 in place of those of other matrices."""

    def copy_row_group(n: Any, carry: Any) -> Any:
        at = pl.multiple_of(n * ROWS_PER_COPY, ROWS_PER_COPY)
        for source, target in ((refs.rows, refs.group_rows_buffer), (refs.cotangent, refs.group_cotangent_buffer)):
            x = source[pl.ds(pl.multiple_of(first_row + at, ROWS_PER_COPY), ROWS_PER_COPY)]
            target[pl.ds(at, ROWS_PER_COPY)] = zero_outside(
                x, work_item.first_row - first_row - at, work_item.end_row - first_row - at, 0
            )
        return carry

    lax.fori_loop(np.int32(0), np.int32(num_rows // ROWS_PER_COPY), copy_row_group, np.int32(0))


def _add_products(
    refs: MatricesRefs, rows: Any, cotangent: Any, row_range: tuple[int, int], opaque_zero: Any, spec: GroupedSpec
) -> None:
    """Adds the products of a range of rows, strip by strip, so that sums fit the registers.

    Operands are not kept in registers either: each product reloads its own.

    Args:
        refs: Blocks and scratch memory.
        rows: Reference to the rows of lhs.
        cotangent: Reference to those of the cotangent.
        row_range: The first row, and their number.
        opaque_zero: An opaque zero.
        spec: The kernel's constants.
    """
    (height, width), (row, deep) = refs.acc.shape, row_range
    left, right = (cotangent, rows) if spec.transposes_matrices else (rows, cotangent)
    for row_offset in range(0, height, COLUMNS_PER_PRODUCT):
        out_rows = slice(row_offset, min(height, row_offset + COLUMNS_PER_PRODUCT))
        for column in range(0, width, spec.columns_per_strip):
            out_columns = slice(column, min(width, column + spec.columns_per_strip))
            refs.acc[out_rows, out_columns] += matrix_product(
                left[pl.ds(opaque_offset(row, column, opaque_zero), deep), out_rows].astype(spec.operand_dtype),
                right[pl.ds(opaque_offset(row, row_offset, opaque_zero), deep), out_columns].astype(spec.operand_dtype),
                (0, 0),
                spec.precision,
            )


def _store_tile_gradients(refs: MatricesRefs, first_matrix_row: Any, spec: GroupedSpec) -> None:
    """Writes the gradients of a tile of a matrix whose first row, of the contracted elements, is `first_matrix_row`."""
    if refs.rhs_bias is not None:
        refs.rhs_bias[...] = refs.bias_acc[...]
    if refs.rhs is not None and refs.scales is None:
        for column in range(0, refs.acc.shape[1], COLUMNS_PER_PRODUCT):
            strip = (slice(None), slice(column, min(refs.acc.shape[1], column + COLUMNS_PER_PRODUCT)))
            refs.rhs[strip] = refs.acc[strip].astype(refs.rhs.dtype)
    if refs.scales is not None:
        _store_tile_and_scale_gradients(refs, first_matrix_row, spec)


def _store_tile_and_scale_gradients(refs: MatricesRefs, first_matrix_row: Any, spec: GroupedSpec) -> None:
    """Writes the gradients of a tile of a matrix with scales, and of the scales."""
    total, size = refs.acc[...], spec.blocks.contracted
    if refs.rhs_scale is not None:
        partial_sums = total * refs.matrices[...].astype(jnp.float32)
        axis = 1 if spec.transposes_matrices else 0
        partial_sums = zero_outside(partial_sums, 0, spec.num_contracted - first_matrix_row, axis)
        # The sum over the rows of each scale is a product with ones and zeros: the matrix unit is idle here.
        ones = scale_block_membership(refs.rhs_scale.shape[0], first_matrix_row, size, spec)
        refs.rhs_scale[...] = matrix_product(ones, partial_sums, (1, axis), lax.Precision.HIGHEST)
    if refs.rhs is not None:
        factor = spread_scales_over_tile(
            refs.scales[...], first_matrix_row, size, spec, columns_first=spec.transposes_matrices
        )
        refs.rhs[...] = (total * factor).astype(refs.rhs.dtype)
