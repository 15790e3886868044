"""Launches of the kernels: shared memory and barriers, clusters, and the number of blocks."""

from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap

from ejkernel.families.grouped_matmul import GroupedMatmul, group_rows
from ejkernel.families.grouped_matmul.row_tiles import find_row_tiles
from ejkernel_pallas.gpu.grouped_matmul.kernels import consumer, matrix_gradients, work_queue
from ejkernel_pallas.gpu.grouped_matmul.kernels.call import Call
from ejkernel_pallas.gpu.grouped_matmul.plan import order_groups_by_size
from ejkernel_pallas.gpu.grouped_matmul.spec import (
    BLOCK_M,
    SCALE_BLOCKS_PER_COPY,
    STEP_ELEMENTS,
    WARPGROUPS,
    GroupedSpec,
)
from ejkernel_pallas.gpu.hopper import clusters
from ejkernel_pallas.gpu.hopper.launch import launch, matrix, transforms
from ejkernel_pallas.gpu.hopper.sizes import SWIZZLE_COLUMNS, WGMMA_M
from ejkernel_pallas.gpu.hopper.tile_scheduler import make_tile_counter, multiprocessors

Kernel = Callable[[Call], None]
"""A kernel of rows, as a function that runs one thread block."""


def launch_rows(kernel: Kernel, spec: GroupedSpec, operands: dict[str, jax.Array], record: GroupedMatmul) -> jax.Array:
    """Runs a kernel of rows; returns [M, columns]."""
    blocks = multiprocessors() // spec.members

    @sequential_vmap
    def run(operands: dict[str, jax.Array]) -> jax.Array:
        def body(operand_refs: dict[str, Any], output_refs: Any, buffers: dict[str, Any]) -> None:
            a, a_rows_view = buffers["a"]
            out, out_rows_view = buffers["out"]
            names = {"a": a, "a_rows_view": a_rows_view, "out": out, "out_rows_view": out_rows_view}
            if spec.splits and not spec.gate:
                names["b"], names["b_half_tiles"] = buffers["b"]
            shared = consumer.Shared(**{**buffers, **names})
            tile_counter = make_tile_counter() if spec.dynamic_schedule else None
            kernel(Call(spec, blocks, operand_refs, output_refs[0], shared, tile_counter))

        shape = jax.ShapeDtypeStruct((spec.rows, spec.columns), spec.out)
        return launch(body, operands, [shape], _rows_scratch(spec), blocks, WARPGROUPS, _cluster(spec))[0]

    return run({**operands, "tiles": find_row_tiles(record, BLOCK_M)})


def launch_matrices(spec: GroupedSpec, left: jax.Array, right: jax.Array, record: GroupedMatmul) -> jax.Array:
    """Returns sums of left_i^T right_i over the rows of each group."""
    blocks = multiprocessors() // spec.members

    @sequential_vmap
    def run(left: jax.Array, right: jax.Array, bounds: jax.Array) -> jax.Array:
        def body(operand_refs: dict[str, Any], output_refs: Any, buffers: dict[str, Any]) -> None:
            matrix_gradients.matrices_kernel(
                Call(spec, blocks, operand_refs, output_refs[0], matrix_gradients.Shared(**buffers))
            )

        shape = jax.ShapeDtypeStruct((spec.matrices, spec.contracted, spec.columns), spec.out)
        operands = {"left": left, "right": right, "bounds": bounds}
        return launch(body, operands, [shape], _matrices_scratch(spec), blocks, WARPGROUPS, _cluster(spec))[0]

    return run(left, right, order_groups_by_size(*group_rows(record)))


def _cluster(spec: GroupedSpec) -> dict[str, int] | None:
    """Returns the name of the cluster axis and the blocks per cluster."""
    return {clusters.CLUSTER_AXIS: spec.members} if spec.members > 1 else None


def _free_barrier(spec: GroupedSpec) -> Any:
    """Returns the mbarriers that count reads of a stage: by both members of a cluster, if copies of both may write
    to it.
    """
    options: dict[str, Any] = {"num_arrivals": WARPGROUPS, "num_barriers": spec.tile.stages}
    if spec.members == 1:
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
    part[0 if spec.transposed else 1] //= 2
    return plgpu.RefUnion(matrix(shape, spec.dtype), matrix((2 * stages, *part), spec.dtype))


def _matrix_stages(spec: GroupedSpec) -> Any:
    """Returns shared memory for the stages' tiles of matrices."""
    tile = spec.tile
    if spec.gate:
        return matrix((tile.stages, spec.panels, spec.step, SWIZZLE_COLUMNS), spec.dtype)
    part = (tile.block_n, spec.step) if spec.transposed else (spec.step, tile.block_n)
    return _half_tile_views((tile.stages, *part), spec) if spec.splits else matrix((tile.stages, *part), spec.dtype)


def _rows_scratch(spec: GroupedSpec) -> dict[str, Any]:
    """Returns shared memory and mbarriers, by the names of `consumer.Shared`."""
    tile = spec.tile
    scales: dict[str, Any] = {}
    if spec.scaling:
        scales["columns"] = plgpu.SMEM((tile.stages + 1, tile.block_n), jnp.float32)
        if spec.scaling.copies_row_scales:
            scales["row_scales"] = plgpu.SMEM((tile.stages, WARPGROUPS, WGMMA_M, SCALE_BLOCKS_PER_COPY), jnp.float32)
    # Copies that fill a stage: rows of each warpgroup, or all gathered rows together; a matrix's columns, for both
    # warpgroups, or their panels; scales of columns, and those of each warpgroup's rows.
    scale_copies = ("columns" in scales) + WARPGROUPS * ("row_scales" in scales)
    copies = (1 if spec.gathers else WARPGROUPS) + (spec.panels if spec.gate else 1) + scale_copies
    return {
        "a": _row_copy_views((tile.stages * WARPGROUPS, WGMMA_M, spec.step), spec.dtype),
        "b": _matrix_stages(spec),
        "out": _row_copy_views((WARPGROUPS * tile.output_buffers, WGMMA_M, spec.part), spec.out),
        **scales,
        **(work_queue.scratch() if spec.dynamic_schedule else {}),
        "full": plgpu.Barrier(num_arrivals=copies, num_barriers=tile.stages),
        "free": _free_barrier(spec),
    }


def _matrices_scratch(spec: GroupedSpec) -> dict[str, Any]:
    """Returns shared memory and mbarriers, by the names of `matrix_gradients.Shared`."""
    tile, out = spec.tile, transforms()
    if spec.out.itemsize == 4:
        # Swizzled rows of 128 bytes: 32 columns of 32 bits.
        out = (plgpu.TilingTransform((8, spec.part)), plgpu.SwizzleTransform(128))
    return {
        "left": matrix((tile.stages, STEP_ELEMENTS, BLOCK_M), spec.dtype),
        "right": matrix((tile.stages, STEP_ELEMENTS, tile.block_n), spec.dtype),
        "out": plgpu.SMEM((WARPGROUPS * tile.output_buffers, WGMMA_M, spec.part), spec.out, transforms=out),
        "full": plgpu.Barrier(num_arrivals=2, num_barriers=tile.stages),
        "free": _free_barrier(spec),
        "raw": plgpu.Barrier(num_arrivals=2, num_barriers=tile.stages),
    }
