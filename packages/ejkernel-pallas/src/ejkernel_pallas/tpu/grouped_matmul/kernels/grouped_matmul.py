"""Multiplies rows by the matrices of their groups: the output, and the gradient of lhs.

    grid: (tiles of columns, work items, tiles of contracted elements); an item is a tile of rows and one group's matrix

        rows [block_m, block_k] ◄── double buffer ─┐
        matrices [block_k, block_n] ◄── likewise ──┴─► products of parts ──► acc [block_m, block_n]
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
from ejkernel.families.gated_grouped_matmul import activated_gate_times_factor, activated_products
from ejkernel.families.grouped_matmul import GroupedMatmul
from ejkernel_pallas.tpu.grouped_matmul.kernels.refs import RowsRefs
from ejkernel_pallas.tpu.grouped_matmul.plan import (
    BEFORE_ALL_GROUPS,
    FIRST,
    WHOLE,
    WORK,
    WorkItem,
    by_rows,
    coordinates_of,
    read_item,
)
from ejkernel_pallas.tpu.grouped_matmul.spec import CHUNK, Gate, GateLayout, GroupedSpec, factors, padded_scales
from ejkernel_pallas.tpu.mosaic import vectors
from ejkernel_pallas.tpu.mosaic.division import divide
from ejkernel_pallas.tpu.mosaic.launch import KernelCall, Operand, launch, vmem_limit
from ejkernel_pallas.tpu.mosaic.loops import loop
from ejkernel_pallas.tpu.mosaic.offsets import opaque_offset
from ejkernel_pallas.tpu.mosaic.vectors import LANES, SUBLANES, deinterleave, product, widen, zero_outside


class TileIndex(NamedTuple):
    """Tile of columns, tile of contracted elements, and an opaque zero, which the compiler cannot fold."""

    n: Any
    k: Any
    zero: Any


class SubTile(NamedTuple):
    """A subtile of the output: some rows, possibly traced, and columns."""

    row: Any
    rows: int
    column: Any
    columns: int

    @property
    def r(self) -> Any:
        """Returns the rows."""
        return pl.ds(self.row, self.rows)

    @property
    def c(self) -> Any:
        """Returns the columns."""
        return pl.ds(self.column, self.columns)


def multiply(
    record: GroupedMatmul, rows: jax.Array, spec: GroupedSpec, extra: dict[str, jax.Array], dtype: Any
) -> jax.Array:
    """Multiplies every row by the matrix of its group.

    Args:
        record: Has the matrices, their scales, and the group sizes.
        rows: [M, K] of the product.
        spec: The kernel's constants.
        extra: Arrays to add: `"bias"` [E, 1, N] float32 and `"existing"` [M, N]; and `"has_token"` float32 [M] for a
            gated product.
        dtype: Dtype of the result.

    Returns:
        [M, N]; unassigned rows are `"existing"`, or 0.
    """
    work, (height, _, width) = by_rows(record, spec.blocks.rows), spec.blocks
    array = jax.ShapeDtypeStruct((spec.rows, spec.columns), dtype)
    scratch: dict[str, Any] = {}
    if spec.sums_in_memory:
        scratch["acc"] = pltpu.VMEM((height, _sum_lanes(spec)), jnp.float32)
        if spec.gate is not None and spec.gate.layout is GateLayout.HALVES:
            scratch["factor_acc"] = scratch["acc"]
        if spec.stages_last_product:
            scratch["last"] = pltpu.VMEM((height, CHUNK), jnp.float32)
    if spec.stages_row_mask:
        scratch["row_mask"] = pltpu.VMEM((spec.subtile_rows, LANES), jnp.int32)
    inputs = _inputs(record, rows, spec, extra)
    outputs = {"output": Operand(array, (height, width), lambda v, n, k: (v.tile, n))}
    results = launch(
        KernelCall(
            name=_kernel_name(spec),
            kernel=functools.partial(_kernel, spec=spec),
            refs=RowsRefs,
            grid=(cdiv(spec.columns, width), work.total, spec.steps),
            # Only columns are parallel: items that share a tile of rows are consecutive, since they write to one block.
            parallel=1,
            tables={"table": work.table},
            inputs=inputs,
            outputs=outputs,
            scratch=scratch,
            where=coordinates_of(1),
            vmem_limit=vmem_limit((*inputs.values(), *outputs.values()), scratch),
        )
    )
    return results["output"]


def _kernel_name(spec: GroupedSpec) -> str:
    if spec.gate is not None:
        return "ejkernel_gated_grouped_matmul"
    return "ejkernel_grouped_matmul_backward_rows" if spec.backward else "ejkernel_grouped_matmul"


def _sum_lanes(spec: GroupedSpec) -> int:
    """Returns the lanes of a block's sums and of its bias; of interleaved ones, whole pairs of lane groups."""
    pairs = spec.gate is not None and spec.gate.layout is GateLayout.INTERLEAVED
    return cdiv(spec.block_columns, 2 * LANES) * 2 * LANES if pairs else spec.block_columns


def _inputs(
    record: GroupedMatmul, rows: jax.Array, spec: GroupedSpec, extra: dict[str, jax.Array]
) -> dict[str, Operand]:
    (height, depth, _), width = spec.blocks, spec.block_columns
    inputs = {"rows": Operand(rows, (height, depth), lambda v, n, k: (v.source, _step(v, k, spec)))}
    if spec.transposed:
        block, index = (None, width, depth), lambda v, n, k: (v.matrix, n, _step(v, k, spec))
    else:
        block, index = (None, depth, width), lambda v, n, k: (v.matrix, _step(v, k, spec), n)
    inputs["matrices"] = Operand(record.rhs, block, index)
    if record.rhs_scale is not None:
        inputs["scales"] = _scale_operand(padded_scales(record.rhs_scale), spec)
    if "bias" in extra:
        bias, lanes = extra["bias"], _sum_lanes(spec)
        if lanes > width:
            bias = jnp.pad(bias, ((0, 0), (0, 0), (0, lanes - width)))
        inputs["bias"] = Operand(bias, (None, 1, lanes), lambda v, n, k: (v.matrix, 0, n))
    if "existing" in extra:
        inputs["existing"] = Operand(extra["existing"], (height, width), lambda v, n, k: (v.tile, n))
    if "has_token" in extra:
        flags = jnp.pad(extra["has_token"], (0, -spec.rows % height)).reshape(-1, 1, height)
        inputs["has_token"] = Operand(flags, (None, 1, height), lambda v, n, k: (v.tile, 0, 0))
    if spec.gate is not None and spec.gate.layout is GateLayout.HALVES:
        for name in ("matrices", "bias"):
            if name in inputs:
                inputs[f"factor_{name}"] = _other_half_operand(inputs[name], cdiv(spec.columns, width))
    return inputs


def _other_half_operand(operand: Operand, blocks: int) -> Operand:
    """Returns the same block of a matrix's, or of a bias's, other half, `blocks` blocks of columns later."""
    return dataclasses.replace(operand, index=lambda v, n, k: operand.index(v, n + blocks, k))


def _step(v: WorkItem, k: Any, spec: GroupedSpec) -> Any:
    """Returns the tile of contracted elements. An item without work gets the tile of a neighbouring item, so that
    nothing is copied.
    """
    return jnp.where(v.has(WORK), k, jnp.where(v.has(BEFORE_ALL_GROUPS), 0, spec.steps - 1))


def _scale_operand(scales: jax.Array, spec: GroupedSpec) -> Operand:
    size = spec.blocks.contracted if spec.backward else spec.blocks.columns
    block = (None, scales.shape[1], size)
    if spec.backward:
        return Operand(scales, block, lambda v, n, k: (v.matrix, 0, _step(v, k, spec)))
    return Operand(scales, block, lambda v, n, k: (v.matrix, 0, n))


def _kernel(refs: RowsRefs, *, spec: GroupedSpec) -> None:
    """Processes one tile of contracted elements of one work item.

    Args:
        refs: Blocks and scratch memory.
        spec: The kernel's constants.
    """
    v = read_item(refs.table, pl.program_id(1))
    at = TileIndex(pl.program_id(0), pl.program_id(2), v.zero)
    whole, partial = v.has(WHOLE), (v.flags & (WORK | WHOLE)) == WORK
    last = at.k == spec.steps - 1
    if spec.steps > 1:

        @pl.when(v.has(WORK) & (at.k == 0))
        def _() -> None:
            for product_refs in refs.products:
                product_refs.acc[...] = jnp.zeros_like(product_refs.acc)

    if refs.acc is not None:
        # Only the last tile of contracted elements extends past them; the others need no mask.
        for when, masks_tail in ((~last, False), (last, True)) if spec.ragged else ((True, False),):
            add = functools.partial(_add_all_products, refs, at, spec=spec, masks_tail=masks_tail)
            pl.when(whole & when)(functools.partial(_for_each_column_subtile, spec, spec.block_columns, 0, add))
            pl.when(partial & when)(functools.partial(_for_each_subtile, spec, spec.block_columns, v, add))
    write = functools.partial(_write, refs, at, spec=spec)
    width = spec.blocks.columns
    pl.when(whole & last)(functools.partial(_for_each_column_subtile, spec, width, 0, write))
    pl.when(v.has(FIRST) & ~whole & last)(functools.partial(_write_ungrouped, refs))
    pl.when(partial & last)(functools.partial(_for_each_subtile, spec, width, v, functools.partial(write, v=v)))


def _for_each_column_subtile(
    spec: GroupedSpec, width: int, row: Any, work: Callable[[SubTile], None], rows: int | None = None
) -> None:
    """Calls `work` with subtiles of `width` columns in total that have all or `rows` rows, and few columns each, whose
    sums fit registers.
    """
    height = spec.blocks.rows

    def add_columns(n: Any, carry: Any) -> Any:
        work(SubTile(row, rows or height, pl.multiple_of(n * CHUNK, CHUNK), CHUNK))
        return carry

    looped_subtiles = 0 if spec.unrolls else width // CHUNK
    if looped_subtiles:
        lax.fori_loop(np.int32(0), np.int32(looped_subtiles), add_columns, np.int32(0))
    for column in range(looped_subtiles * CHUNK, width, CHUNK):
        work(SubTile(row, rows or height, column, min(CHUNK, width - column)))


def _for_each_subtile(spec: GroupedSpec, width: int, v: WorkItem, work: Callable[[SubTile], None]) -> None:
    """Calls `work` with subtiles that cover all rows of the item and few rows of other items."""
    rows = spec.subtile_rows

    def process_row_subtile(n: Any, carry: Any) -> Any:
        _for_each_column_subtile(spec, width, pl.multiple_of(n * rows, rows), work, rows)
        return carry

    loop(divide(v.low, rows), divide(v.high + (rows - 1), rows), process_row_subtile, np.int32(0))


def _add_all_products(refs: RowsRefs, at: TileIndex, sub: SubTile, spec: GroupedSpec, masks_tail: bool) -> None:
    """Adds to each of a tile's sums."""
    for product_refs in refs.products:
        _add(product_refs, at, sub, spec, masks_tail)


def _add(refs: RowsRefs, at: TileIndex, sub: SubTile, spec: GroupedSpec, masks_tail: bool) -> None:
    """Adds the products of a subtile; with `masks_tail`, tiles extend past the contracted elements."""
    for start, size in spec.pieces:
        partial_sum = _product(refs, at, sub, spec, (start, size), masks_tail)
        if start == 0 and spec.steps == 1:
            row = opaque_offset(sub.row, SUBLANES, at.zero) if spec.reloads_first else sub.row
            refs.acc[pl.ds(row, sub.rows), sub.c] = partial_sum
            continue
        if spec.stages_last_product and (start, size) == spec.pieces[-1]:
            last = refs.last.at[sub.r, : sub.columns]
            last[...] = partial_sum
            partial_sum = last[...]
        refs.acc[sub.r, sub.c] += partial_sum


def _product(
    refs: RowsRefs, at: TileIndex, sub: SubTile, spec: GroupedSpec, piece: tuple[int, int], masks_tail: bool = False
) -> jax.Array:
    """Returns the product over a piece of the contracted elements."""
    start, size = piece
    inner = slice(start, start + size)
    row = sub.row
    if spec.sums_in_memory:  # their loads and stores need the registers in which rows would be kept for other columns
        row = opaque_offset(row, sub.column, at.zero)
    rows = refs.rows[pl.ds(row, sub.rows), inner]
    matrix = refs.matrices[sub.c, inner] if spec.transposed else refs.matrices[inner, sub.c]
    if refs.scales is not None and not spec.scales_products:
        matrix = matrix.astype(jnp.float32) * _factors(refs, at, sub, spec, piece)
    if masks_tail:
        # In both operands: past the end either may hold NaN, and 0 times NaN is NaN.
        left = spec.contracted - at.k * spec.blocks.contracted - start
        rows = zero_outside(rows, 0, left, 1)
        matrix = zero_outside(matrix, 0, left, 1 if spec.transposed else 0)
    pair = rows.astype(spec.operand), matrix.astype(spec.operand)
    partial_sum = product(*pair, (1, 1 if spec.transposed else 0), spec.precision)
    if refs.scales is not None and spec.scales_products and not spec.scales_sum:
        block = divide(at.k * spec.blocks.contracted + start, spec.per_scale)
        partial_sum = partial_sum * refs.scales[pl.ds(block, 1), sub.c]
    return partial_sum


def _factors(refs: RowsRefs, at: TileIndex, sub: SubTile, spec: GroupedSpec, piece: tuple[int, int]) -> jax.Array:
    """Returns the scales of a matrix, in the shape of its subtile."""
    columns_first = spec.transposed != spec.backward
    if spec.backward:
        scales = refs.scales[:, slice(piece[0], piece[0] + piece[1])]
        return factors(scales, at.n * spec.blocks.columns + sub.column, sub.columns, spec, columns_first)
    first = at.k * spec.blocks.contracted + piece[0]
    return factors(refs.scales[:, sub.c], first, piece[1], spec, columns_first)


def _write_ungrouped(refs: RowsRefs) -> None:
    """Writes unassigned rows."""
    output = refs.output
    if refs.existing is not None:
        output[...] = refs.existing[...].astype(output.dtype)
    else:
        output[...] = jnp.zeros_like(output)


def _write(refs: RowsRefs, at: TileIndex, sub: SubTile, spec: GroupedSpec, v: WorkItem | None = None) -> None:
    """Writes a subtile of the output; with an item, only its rows."""
    total = _sum(refs, at, sub, spec) if spec.gate is None else _gated_sum(refs, at, sub, spec, spec.gate)
    output = refs.output
    if v is not None:
        # Other rows keep what their groups' items wrote: the block stays in VMEM until the tile of rows changes.
        mask = _group_row_mask(refs, at, sub, spec, v)
        total = jnp.where(mask, total, output[sub.r, sub.c].astype(jnp.float32))
    output[sub.r, sub.c] = total.astype(output.dtype)


def _sum(refs: RowsRefs, at: TileIndex, sub: SubTile, spec: GroupedSpec) -> jax.Array:
    """Returns the sum of a subtile, with bias and existing output."""
    total = refs.acc[sub.r, sub.c] if refs.acc is not None else _product(refs, at, sub, spec, spec.pieces[0])
    if spec.scales_sum:
        total = total * refs.scales[:1, sub.c]
    if refs.bias is not None:
        total = total + refs.bias[:, sub.c]
    if refs.existing is not None:
        total = total + refs.existing[sub.r, sub.c].astype(jnp.float32)
    return total


def _gated_sum(refs: RowsRefs, at: TileIndex, sub: SubTile, spec: GroupedSpec, gate: Gate) -> jax.Array:
    """Returns a subtile of the output: the activation of sums, times their factors where there is a gate."""
    if gate.layout is GateLayout.NONE:
        output = activated_products(gate, _sum(refs, at, sub, spec))
    elif gate.layout is GateLayout.HALVES:
        output = activated_gate_times_factor(
            gate, *(_sum(product_refs, at, sub, spec) for product_refs in refs.products)
        )
    elif gate.layout is GateLayout.WHOLE:
        factor = sub._replace(column=sub.column + spec.columns)
        output = activated_gate_times_factor(gate, _sum(refs, at, sub, spec), _sum(refs, at, factor, spec))
    else:
        lanes = cdiv(sub.columns, LANES) * 2 * LANES
        pairs = _sum(refs, at, sub._replace(column=sub.column * 2, columns=lanes), spec)
        output = activated_gate_times_factor(gate, *(x[:, : sub.columns] for x in deinterleave(pairs)))
    if refs.has_token is not None:
        has_token = widen(vectors.column(refs.has_token[:, pl.ds(sub.row, sub.rows)]), output.shape[1])
        output = jnp.where(has_token != 0, output, 0.0)
    return output


def _group_row_mask(refs: RowsRefs, at: TileIndex, sub: SubTile, spec: GroupedSpec, v: WorkItem) -> jax.Array:
    """Returns which rows of a subtile belong to the item, over all of its columns; the same for all subtiles of
    these rows.
    """
    if not spec.stages_row_mask:
        row = sub.row + lax.broadcasted_iota(jnp.int32, (sub.rows, sub.columns), 0)
        return (row >= v.low) & (row < v.high)
    row_mask = refs.row_mask
    if sub.column == 0:
        row = sub.row + lax.broadcasted_iota(jnp.int32, row_mask.shape, 0)
        row_mask[...] = jnp.where((row >= v.low) & (row < v.high), 1, 0)
    mask = row_mask[pl.ds(opaque_offset(0, sub.column, at.zero), sub.rows)]
    return jnp.concatenate([mask] * cdiv(sub.columns, LANES), axis=1)[:, : sub.columns] != 0
