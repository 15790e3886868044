"""Both passes of a grouped matmul on Hopper; the formulas are in `ejkernel_xla.grouped_matmul.backward`."""

import dataclasses
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap

from ejkernel.families.gated_grouped_matmul import GatedGroupedMatmul
from ejkernel.families.grouped_matmul import GroupedMatmul, group_rows
from ejkernel.families.grouped_matmul.row_tiles import find_row_tiles
from ejkernel.types.pullback import Pullback
from ejkernel_pallas.gpu.grouped_matmul import matrices, rows, work_queue
from ejkernel_pallas.gpu.grouped_matmul.call import Call
from ejkernel_pallas.gpu.grouped_matmul.gated_spec import HopperGated, make_gated_spec, product_of
from ejkernel_pallas.gpu.grouped_matmul.scaled_spec import make_scaled_spec, share_scales
from ejkernel_pallas.gpu.grouped_matmul.spec import (
    BLOCK_M,
    COPIED_BLOCKS,
    STEP,
    WARPGROUPS,
    GroupedSpec,
    HopperGrouped,
    HopperGroupedBackward,
    HopperScaled,
    make_spec,
)
from ejkernel_pallas.gpu.hopper import clusters
from ejkernel_pallas.gpu.hopper.launch import launch, matrix, transforms
from ejkernel_pallas.gpu.hopper.sizes import SWIZZLE_COLUMNS, WGMMA_M
from ejkernel_pallas.gpu.hopper.tile_scheduler import counter, multiprocessors

SCALES = ("lhs_scale", "rhs_scale", "same")


def forward(record: GroupedMatmul, params: HopperGrouped) -> tuple[jax.Array, tuple[()]]:
    """The output of a record.

    Args:
        record: The canonical arguments.
        params: Tile sizes and stages.

    Raises:
        ValueError: A tile size is none that a kernel can have.

    Returns:
        [M, N] in the record's `out_dtype`. There are no residuals.
    """
    spec = make_spec(record, params, record.out_dtype)
    return _times_matrices(spec, record.lhs, record), ()


def forward_of_8_bits(record: GroupedMatmul, params: HopperScaled) -> tuple[jax.Array, tuple[()]]:
    """The output of a record of 8-bit rows and matrices with scales.

    Args:
        record: The canonical arguments.
        params: Tile sizes and stages.

    Raises:
        ValueError: A tile size is none that a kernel can have.

    Returns:
        [M, N] in the record's `out_dtype`. There are no residuals.
    """
    assert record.lhs_scale is not None  # the kernel's requirements
    assert record.rhs_scale is not None
    spec = make_scaled_spec(record, params)
    scales = record.lhs_scale.astype(jnp.float32), record.rhs_scale[:, :, 0].astype(jnp.float32)
    if scales[1].shape[1] > 1:
        scales += (share_scales(scales[1], params.product_n),)
    return _times_matrices(spec, record.lhs, record, *scales), ()


def gated_forward(record: GatedGroupedMatmul, params: HopperGated) -> tuple[jax.Array, tuple[()]]:
    """The output of a gated record, whose rows may be gathered.

    Args:
        record: The canonical arguments.
        params: Tile sizes and stages.

    Raises:
        ValueError: A tile size is none that a kernel can have.

    Returns:
        [M, F] in lhs's dtype. There are no residuals.
    """
    spec = make_gated_spec(record, params)
    operands = {"lhs": record.lhs, "rhs": record.rhs}
    if record.indices is not None:
        operands["indices"] = record.indices
    return _tiles_of_rows(spec, operands, product_of(record)), ()


def backward(pullback: Pullback, params: HopperGroupedBackward) -> dict[str, jax.Array]:
    """Gradients of the wanted fields of a record.

    Args:
        pullback: Record, cotangent [M, N], and the wanted names.
        params: Tile sizes and stages of both kernels.

    Raises:
        ValueError: A tile size is none that a kernel can have.

    Returns:
        Each wanted gradient, in its field's shape and dtype.
    """
    # Gradients of left-over rows are 0, whatever the output has there.
    record, gradients = dataclasses.replace(pullback.record, left_over="zero"), dict[str, jax.Array]()
    cotangent = pullback.cotangent.astype(record.lhs.dtype)
    spec = make_spec(record, params, record.lhs.dtype)
    if "lhs" in pullback.wanted:
        other = dataclasses.replace(
            spec, contracted=spec.columns, columns=spec.contracted, transposed=not spec.transposed
        )
        gradients["lhs"] = _times_matrices(other, cotangent, record)
    if "rhs" in pullback.wanted:
        pair = (cotangent, record.lhs) if record.transpose_rhs else (record.lhs, cotangent)
        sizes = {"contracted": pair[0].shape[1], "columns": pair[1].shape[1]}
        of_rhs = make_spec(record, params.of_rhs, record.rhs.dtype)
        gradients["rhs"] = _matrix_sums(dataclasses.replace(of_rhs, **sizes), *pair, record)
    return gradients


def _times_matrices(spec: GroupedSpec, operand: jax.Array, record: GroupedMatmul, *scales: jax.Array) -> jax.Array:
    """Rows [M, contracted] times the matrices of their groups; of 8 bits with the first of `SCALES`."""
    operands = {"lhs": operand, "rhs": record.rhs, **dict(zip(SCALES[: len(scales)], scales, strict=True))}
    return _tiles_of_rows(spec, operands, record)


def _tiles_of_rows(spec: GroupedSpec, operands: dict[str, jax.Array], record: GroupedMatmul) -> jax.Array:
    """What rows.py makes of its operands, [M, columns]."""
    blocks = multiprocessors() // spec.members

    @sequential_vmap
    def run(operands: dict[str, jax.Array]) -> jax.Array:
        def body(given: dict[str, Any], made: Any, buffers: dict[str, Any]) -> None:
            a, a_lines = buffers["a"]
            out, out_lines = buffers["out"]
            names = {"a": a, "a_lines": a_lines, "out": out, "out_lines": out_lines}
            if spec.splits and not spec.gate:
                names["b"], names["b_half"] = buffers["b"]
            shared = rows.Shared(**{**buffers, **names})
            tile_counter = counter() if spec.dynamic else None
            rows.rows_kernel(Call(spec, blocks, given, made[0], shared, tile_counter))

        shape = jax.ShapeDtypeStruct((spec.rows, spec.columns), spec.out)
        return launch(body, operands, [shape], _rows_scratch(spec), blocks, WARPGROUPS, _cluster(spec))[0]

    return run({**operands, "tiles": find_row_tiles(record, BLOCK_M)})


def _matrix_sums(spec: GroupedSpec, left: jax.Array, right: jax.Array, record: GroupedMatmul) -> jax.Array:
    """Sums of left_i^T right_i over the rows of each group."""
    blocks = multiprocessors() // spec.members

    @sequential_vmap
    def run(left: jax.Array, right: jax.Array, bounds: jax.Array) -> jax.Array:
        def body(given: dict[str, Any], made: Any, buffers: dict[str, Any]) -> None:
            matrices.matrices_kernel(Call(spec, blocks, given, made[0], matrices.Shared(**buffers)))

        shape = jax.ShapeDtypeStruct((spec.matrices, spec.contracted, spec.columns), spec.out)
        operands = {"left": left, "right": right, "bounds": bounds}
        return launch(body, operands, [shape], _matrices_scratch(spec), blocks, WARPGROUPS, _cluster(spec))[0]

    return run(left, right, _longest_first(*group_rows(record)))


def _longest_first(first: jax.Array, end: jax.Array) -> jax.Array:
    """First row, the row after the last, and number of every matrix, those of the most rows first: int32 [E, 3]."""
    rows, matrix = end - first, jnp.arange(first.shape[0], dtype=jnp.int32)
    # Counting, not sorting: sums over so few are small kernels, a sort is a slow one.
    before = (rows > rows[:, None]) | ((rows == rows[:, None]) & (matrix < matrix[:, None]))
    place = jnp.sum(before, axis=1, dtype=jnp.int32)
    fields = jnp.stack((first, end, matrix), axis=1)
    return jnp.sum(jnp.where((place == matrix[:, None])[..., None], fields, 0), axis=1, dtype=jnp.int32)


def _cluster(spec: GroupedSpec) -> dict[str, int] | None:
    """Name and number of the blocks of a cluster."""
    return {clusters.AXIS: spec.members} if spec.members > 1 else None


def _free_barrier(spec: GroupedSpec) -> Any:
    """What says that a stage has been read: by both members of a cluster, as copies of both may write there."""
    options: dict[str, Any] = {"num_arrivals": WARPGROUPS, "num_barriers": spec.tile.stages}
    if spec.members == 1:
        return plgpu.Barrier(**options)
    return plgpu.ClusterBarrier(collective_axes=(clusters.AXIS,), **options)


def _lines(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory in two views: as products read it, and row after row, a swizzled row of 128 bytes each.

    Eight rows by one swizzled row are a tile of the first, so that both have every element in the same place. Copies of
    the second may begin at any row of an array, those of the first at every eighth.
    """
    width = shape[-1]
    tiled = plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(128)))
    return plgpu.RefUnion(tiled, plgpu.SMEM(shape, dtype, transforms=(plgpu.SwizzleTransform(128),)))


def _halves(shape: tuple[int, ...], spec: GroupedSpec) -> Any:
    """Shared memory in two views: tiles of matrices, and, of each, two of half the columns."""
    stages, *part = shape
    part[0 if spec.transposed else 1] //= 2
    return plgpu.RefUnion(matrix(shape, spec.dtype), matrix((2 * stages, *part), spec.dtype))


def _matrix_stages(spec: GroupedSpec) -> Any:
    """Shared memory of the stages' tiles of matrices."""
    tile = spec.tile
    if spec.gate:
        return matrix((tile.stages, spec.panels, spec.step, SWIZZLE_COLUMNS), spec.dtype)
    part = (tile.block_n, spec.step) if spec.transposed else (spec.step, tile.block_n)
    return _halves((tile.stages, *part), spec) if spec.splits else matrix((tile.stages, *part), spec.dtype)


def _rows_scratch(spec: GroupedSpec) -> dict[str, Any]:
    """Shared memory and barriers, by the names of `rows.Shared`."""
    tile = spec.tile
    scales: dict[str, Any] = {}
    if spec.scaling:
        scales["columns"] = plgpu.SMEM((tile.stages + 1, tile.block_n), jnp.float32)
        if spec.scaling.copies_rows:
            scales["row_scales"] = plgpu.SMEM((tile.stages, WARPGROUPS, WGMMA_M, COPIED_BLOCKS), jnp.float32)
    # What fills a stage: rows of each warpgroup, or their gathered rows together; a matrix's columns, which both read,
    # or their panels; scales of columns, and those of each warpgroup's rows.
    of_scales = ("columns" in scales) + WARPGROUPS * ("row_scales" in scales)
    copies = (1 if spec.gathers else WARPGROUPS) + (spec.panels if spec.gate else 1) + of_scales
    return {
        "a": _lines((tile.stages * WARPGROUPS, WGMMA_M, spec.step), spec.dtype),
        "b": _matrix_stages(spec),
        "out": _lines((WARPGROUPS * tile.slots, WGMMA_M, spec.part), spec.out),
        **scales,
        **(work_queue.scratch() if spec.dynamic else {}),
        "full": plgpu.Barrier(num_arrivals=copies, num_barriers=tile.stages),
        "free": _free_barrier(spec),
    }


def _matrices_scratch(spec: GroupedSpec) -> dict[str, Any]:
    """Shared memory and barriers, by the names of `matrices.Shared`."""
    tile, out = spec.tile, transforms()
    if spec.out.itemsize == 4:
        # Swizzled rows of 128 bytes: 32 columns of 32 bits.
        out = (plgpu.TilingTransform((8, spec.part)), plgpu.SwizzleTransform(128))
    return {
        "left": matrix((tile.stages, STEP, BLOCK_M), spec.dtype),
        "right": matrix((tile.stages, STEP, tile.block_n), spec.dtype),
        "out": plgpu.SMEM((WARPGROUPS * tile.slots, WGMMA_M, spec.part), spec.out, transforms=out),
        "full": plgpu.Barrier(num_arrivals=2, num_barriers=tile.stages),
        "free": _free_barrier(spec),
        "raw": plgpu.Barrier(num_arrivals=2, num_barriers=tile.stages),
    }
