"""Launches of the kernels: shared memory and barriers, clusters, and the number of blocks."""

from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap

from ejkernel.families.grouped_matmul import GroupedMatmul, group_row_bounds
from ejkernel.families.grouped_matmul.row_tiles import find_row_tiles
from ejkernel_pallas.gpu.grouped_matmul.kernels import consumer, matrix_gradients, work_queue
from ejkernel_pallas.gpu.grouped_matmul.kernels.call import Call
from ejkernel_pallas.gpu.grouped_matmul.plan import order_groups_by_size
from ejkernel_pallas.gpu.grouped_matmul.spec import (
    BLOCK_M,
    CONSUMER_WARPGROUPS,
    CONTRACTED_PER_STEP_16_BIT,
    SCALE_BLOCKS_PER_COPY,
    GroupedSpec,
)
from ejkernel_pallas.gpu.hopper import clusters
from ejkernel_pallas.gpu.hopper.launch import launch, wgmma_operand_smem, wgmma_transforms
from ejkernel_pallas.gpu.hopper.sizes import SWIZZLE_COLUMNS, WGMMA_M
from ejkernel_pallas.gpu.hopper.tile_scheduler import make_tile_counter, num_multiprocessors

RowKernel = Callable[[Call], None]
"""A kernel of rows, as a function that runs one thread block."""


def launch_row_kernel(
    kernel: RowKernel, spec: GroupedSpec, operands: dict[str, jax.Array], record: GroupedMatmul
) -> jax.Array:
    """Runs a kernel of rows; returns [M, columns]."""
    blocks = num_multiprocessors() // spec.blocks_per_cluster

    @sequential_vmap
    def run(operands: dict[str, jax.Array]) -> jax.Array:
        def body(operand_refs: dict[str, Any], output_refs: Any, buffers: dict[str, Any]) -> None:
            a, a_rows_view = buffers["a"]
            output_buffers, output_rows_view = buffers["output_buffers"]
            names = {
                "a": a,
                "a_rows_view": a_rows_view,
                "output_buffers": output_buffers,
                "output_rows_view": output_rows_view,
            }
            if spec.may_split_last_tiles and not spec.activation_constants:
                names["b"], names["b_half_tiles"] = buffers["b"]
            shared = consumer.SharedMemory(**{**buffers, **names})
            tile_counter = make_tile_counter() if spec.dynamic_schedule else None
            kernel(Call(spec, blocks, operand_refs, output_refs[0], shared, tile_counter))

        shape = jax.ShapeDtypeStruct((spec.num_rows, spec.num_columns), spec.out_dtype)
        return launch(
            body, operands, [shape], _row_kernel_scratch(spec), blocks, CONSUMER_WARPGROUPS, _cluster_axis_size(spec)
        )[0]

    return run({**operands, "tiles": find_row_tiles(record, BLOCK_M)})


def launch_matrix_gradients(
    spec: GroupedSpec, left_rows: jax.Array, right_rows: jax.Array, record: GroupedMatmul
) -> jax.Array:
    """Returns sums of left_i^T right_i over the rows of each group."""
    blocks = num_multiprocessors() // spec.blocks_per_cluster

    @sequential_vmap
    def run(left: jax.Array, right: jax.Array, group_bounds: jax.Array) -> jax.Array:
        def body(operand_refs: dict[str, Any], output_refs: Any, buffers: dict[str, Any]) -> None:
            matrix_gradients.matrix_gradients_kernel(
                Call(spec, blocks, operand_refs, output_refs[0], matrix_gradients.SharedMemory(**buffers))
            )

        shape = jax.ShapeDtypeStruct((spec.num_matrices, spec.contracted_size, spec.num_columns), spec.out_dtype)
        operands = {"left": left, "right": right, "bounds": group_bounds}
        return launch(
            body,
            operands,
            [shape],
            _matrix_gradient_scratch(spec),
            blocks,
            CONSUMER_WARPGROUPS,
            _cluster_axis_size(spec),
        )[0]

    return run(left_rows, right_rows, order_groups_by_size(*group_row_bounds(record)))


def _cluster_axis_size(spec: GroupedSpec) -> dict[str, int] | None:
    """Returns the name of the cluster axis and the blocks per cluster."""
    return {clusters.CLUSTER_AXIS: spec.blocks_per_cluster} if spec.blocks_per_cluster > 1 else None


def _stage_free_barriers(spec: GroupedSpec) -> Any:
    """Returns the mbarriers that count reads of a stage: by both members of a cluster, if copies of both may write
    to it.
    """
    options: dict[str, Any] = {"num_arrivals": CONSUMER_WARPGROUPS, "num_barriers": spec.tile.stages}
    if spec.blocks_per_cluster == 1:
        return plgpu.Barrier(**options)
    return plgpu.ClusterBarrier(collective_axes=(clusters.CLUSTER_AXIS,), **options)


def _row_copy_views(shape: tuple[int, ...], dtype: Any) -> Any:
    """Returns two views of shared memory: in the layout of products, and row after row, in swizzled rows of 128 bytes.

    Eight swizzled rows are a tile of the first view, so every element has the same address in both. Copies to the
    second view may start at any row of an array, those to the first only at multiples of eight.
    """
    width = shape[-1]
    tiled = plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(128)))
    return plgpu.RefUnion(tiled, plgpu.SMEM(shape, dtype, transforms=(plgpu.SwizzleTransform(128),)))


def _half_tile_views(shape: tuple[int, ...], spec: GroupedSpec) -> Any:
    """Returns two views of shared memory: tiles of matrices, and their halves by columns."""
    stages, *part = shape
    part[0 if spec.matrices_are_transposed else 1] //= 2
    return plgpu.RefUnion(
        wgmma_operand_smem(shape, spec.operand_dtype), wgmma_operand_smem((2 * stages, *part), spec.operand_dtype)
    )


def _matrix_tile_stages(spec: GroupedSpec) -> Any:
    """Returns shared memory for the stages' tiles of matrices."""
    tile = spec.tile
    if spec.activation_constants:
        return wgmma_operand_smem(
            (tile.stages, spec.panels_per_stage, spec.contracted_per_step, SWIZZLE_COLUMNS), spec.operand_dtype
        )
    part = (
        (tile.block_n, spec.contracted_per_step)
        if spec.matrices_are_transposed
        else (spec.contracted_per_step, tile.block_n)
    )
    return (
        _half_tile_views((tile.stages, *part), spec)
        if spec.may_split_last_tiles
        else wgmma_operand_smem((tile.stages, *part), spec.operand_dtype)
    )


def _row_kernel_scratch(spec: GroupedSpec) -> dict[str, Any]:
    """Returns shared memory and mbarriers, by the names of `consumer.SharedMemory`."""
    tile = spec.tile
    scales: dict[str, Any] = {}
    if spec.scale_constants:
        scales["column_scales"] = plgpu.SMEM((tile.stages + 1, tile.block_n), jnp.float32)
        if spec.scale_constants.copies_row_scales:
            scales["row_scales"] = plgpu.SMEM(
                (tile.stages, CONSUMER_WARPGROUPS, WGMMA_M, SCALE_BLOCKS_PER_COPY), jnp.float32
            )
    # Copies that fill a stage: rows of each warpgroup, or all gathered rows together; a matrix's columns, for both
    # warpgroups, or their panels; scales of columns, and those of each warpgroup's rows.
    scale_copies = ("column_scales" in scales) + CONSUMER_WARPGROUPS * ("row_scales" in scales)
    copies = (
        (1 if spec.gathers_rows else CONSUMER_WARPGROUPS)
        + (spec.panels_per_stage if spec.activation_constants else 1)
        + scale_copies
    )
    return {
        "a": _row_copy_views(
            (tile.stages * CONSUMER_WARPGROUPS, WGMMA_M, spec.contracted_per_step), spec.operand_dtype
        ),
        "b": _matrix_tile_stages(spec),
        "output_buffers": _row_copy_views(
            (CONSUMER_WARPGROUPS * tile.output_buffers, WGMMA_M, spec.output_buffer_columns), spec.out_dtype
        ),
        **scales,
        **(work_queue.queue_scratch() if spec.dynamic_schedule else {}),
        "operands_full": plgpu.Barrier(num_arrivals=copies, num_barriers=tile.stages),
        "operands_free": _stage_free_barriers(spec),
    }


def _matrix_gradient_scratch(spec: GroupedSpec) -> dict[str, Any]:
    """Returns shared memory and mbarriers, by the names of `matrix_gradients.SharedMemory`."""
    tile, out = spec.tile, wgmma_transforms()
    if spec.out_dtype.itemsize == 4:
        # Swizzled rows of 128 bytes: 32 columns of 32 bits.
        out = (plgpu.TilingTransform((8, spec.output_buffer_columns)), plgpu.SwizzleTransform(128))
    return {
        "left_tiles": wgmma_operand_smem((tile.stages, CONTRACTED_PER_STEP_16_BIT, BLOCK_M), spec.operand_dtype),
        "right_tiles": wgmma_operand_smem((tile.stages, CONTRACTED_PER_STEP_16_BIT, tile.block_n), spec.operand_dtype),
        "output_buffers": plgpu.SMEM(
            (CONSUMER_WARPGROUPS * tile.output_buffers, WGMMA_M, spec.output_buffer_columns),
            spec.out_dtype,
            transforms=out,
        ),
        "operands_full": plgpu.Barrier(num_arrivals=2, num_barriers=tile.stages),
        "operands_free": _stage_free_barriers(spec),
        "copies_done": plgpu.Barrier(num_arrivals=2, num_barriers=tile.stages),
    }
