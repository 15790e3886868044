"""The online softmax of the forward kernel, in registers (Milakov & Gimelshein 2018).

    row_max' = max(row_max, scores)           alpha = exp2(row_max - row_max')
    weights  = exp2(scores - row_max')        row_sum' = alpha row_sum + sum(weights)

Four threads share a row of a WGMMA accumulator. Each step reduces only the maximum over them; every thread sums its own
columns, and `reduce_row_sum` adds the four sums once, in the epilogue.
"""

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from ejkernel_pallas.gpu.hopper.arrays import broadcast_to_columns
from ejkernel_pallas.gpu.hopper.layouts import ROW_LAYOUT
from ejkernel_pallas.gpu.hopper.lazy_rescaling import rescale_lazily
from ejkernel_pallas.gpu.hopper.registers import replace_row_values, row_vector_like, unpack_pair, unpack_row_value
from ejkernel_pallas.gpu.tiled_attention.kernels.soft_cap import compute_capped_weights
from ejkernel_pallas.gpu.tiled_attention.spec import HopperSpec

RESCALE_THRESHOLD = 8.0
"""Lazy rescaling: how far, in base 2, a row's largest score may exceed `row_max` before a rescale.

Weights are then at most 2**8 = 256: float16 does not overflow, and they keep all their significant digits.
"""


def exponentiate(spec: HopperSpec, scores: Any, row_max: Any, row_sum: Any, is_full_block: bool) -> tuple[Any, ...]:
    """Exponentiates the scores of a key block and updates the rows' maximum and sum.

    Args:
        spec: The kernel's constants.
        scores: Float32 [rows, columns], with the soft cap, and -inf where nothing attends; raw products of a full block
            if the spec `fuses_soft_cap`.
        row_max: Running maximum of every row, in base 2.
        row_sum: Running sum of every row, of a thread's own columns.
        is_full_block: Whether all pairs of the block attend.

    Returns:
        The new `row_max` and `row_sum`, the weights, and alpha, the factor of `row_sum` and the accumulator.
    """
    if spec.fixes_row_max_at_zero:
        if is_full_block and spec.fuses_soft_cap:
            weights, sums = compute_capped_weights(spec, scores)
        else:
            weights = jnp.exp2(scores * spec.softmax_scale_log2)
            sums = _thread_row_sum(weights)
        # No alpha: with a fixed maximum `rescale_accumulator` does nothing, so any value will do.
        return row_max, row_sum + sums, weights, row_max
    if spec.blocks_per_split:
        return add_key_block(scores, spec.softmax_scale_log2, row_max, row_sum)
    new_max = jnp.maximum(row_max, scores.max(axis=1) * spec.softmax_scale_log2)
    if spec.rescales_lazily:
        # A maximum that increased by less is kept: alpha is exactly 1, and the warp may skip the accumulator.
        new_max = jnp.where(new_max - row_max > RESCALE_THRESHOLD, new_max, row_max)
    weights = jnp.exp2(scores * spec.softmax_scale_log2 - broadcast_to_columns(new_max, scores.shape))
    alpha = jnp.exp2(row_max - new_max)
    return new_max, row_sum * alpha + _thread_row_sum(weights), weights, alpha


def add_key_block(scores: Any, scale_log2: float, row_max: Any, row_sum: Any) -> tuple[Any, ...]:
    """Returns the new `row_max` and `row_sum`, the weights, and alpha of a block of a split.

    Prefill and decoding call it, so that a row has the same bits in both.

    Args:
        scores: Float32 [rows, columns], raw products, -inf where nothing attends.
        scale_log2: Factor that converts them to base 2.
        row_max: As in `exponentiate`.
        row_sum: As in `exponentiate`.
    """
    new_max = jnp.maximum(row_max, _max_of_rows(scores) * scale_log2)
    weights = jnp.exp2(scores * scale_log2 - broadcast_to_columns(new_max, scores.shape))
    alpha = jnp.exp2(row_max - new_max)
    return new_max, row_sum * alpha + _thread_row_sum(weights), weights, alpha


def rescale_accumulator(spec: HopperSpec, acc: Any, alpha: jax.Array) -> jax.Array:
    """Rescales the accumulator by alpha; with lazy rescaling only in warps where some alpha is below one."""
    if spec.fixes_row_max_at_zero:
        return acc
    if not spec.rescales_lazily:
        return acc * broadcast_to_columns(alpha, acc.shape)
    return rescale_lazily(acc, alpha)


def reduce_row_sum(row_sum: jax.Array) -> jax.Array:
    """Adds the partial sums that four threads have of each row."""

    @plgpu.inline_mgpu(
        arg_types=(ROW_LAYOUT,), return_type=plgpu.ShapeDtypeStruct(row_sum.shape, jnp.float32, layout=ROW_LAYOUT)
    )
    def add(_: Any, rows: Any) -> Any:
        sums = [unpack_row_value(register) for register in rows.registers.flat]
        # The four threads of a row are neighbours.
        for distance in (1, 2):
            sums = [arith.addf(part, mgpu.utils.shfl_bfly(part, distance)) for part in sums]
        return replace_row_values(rows, sums)

    return add(row_sum)  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def _max_of_rows(scores: jax.Array) -> jax.Array:
    """Returns the maximum of every row. Unlike a reduction of Pallas it reserves no shared memory, which is short."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA,),
        return_type=plgpu.ShapeDtypeStruct(scores.shape[:1], jnp.float32, layout=ROW_LAYOUT),
    )
    def reduce(_: Any, tile: Any) -> Any:
        registers, maxima = list(tile.registers.flat), []
        for row in (0, 1):  # registers alternate between a thread's two rows
            values = [value for register in registers[row::2] for value in unpack_pair(register)]
            while len(values) > 1:
                values = [arith.maximumf(x, y) for x, y in zip(values[::2], values[1::2], strict=True)]
            for distance in (1, 2):  # the four threads of a row are neighbours
                values = [arith.maximumf(x, mgpu.utils.shfl_bfly(x, distance)) for x in values]
            maxima += values
        return replace_row_values(row_vector_like(tile, maxima[0]), maxima)

    return reduce(scores)  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def _thread_row_sum(weights: jax.Array) -> jax.Array:
    """Sums each row over a thread's own columns, without a shuffle; `reduce_row_sum` adds up the threads at the end."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA,),
        return_type=plgpu.ShapeDtypeStruct(weights.shape[:1], jnp.float32, layout=ROW_LAYOUT),
    )
    def add(_: Any, tile: Any) -> Any:
        f32 = ir.F32Type.get()
        sums = [arith.constant(f32, ir.FloatAttr.get(f32, 0.0))] * 2
        # Registers alternate between the two rows of a thread.
        for place, register in enumerate(tile.registers.flat):
            for weight in unpack_pair(register):
                sums[place % 2] = arith.addf(sums[place % 2], weight)
        return replace_row_values(row_vector_like(tile, sums[0]), sums)

    return add(weights)  # pyright: ignore[reportCallIssue]  # the decorator gives the context
