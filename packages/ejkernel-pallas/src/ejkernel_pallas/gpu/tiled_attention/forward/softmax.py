"""What the forward kernel keeps of every row of scores: a maximum that weights are relative to, and their sum."""

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from ejkernel_pallas.gpu.hopper.arrays import over_columns
from ejkernel_pallas.gpu.hopper.layouts import ROWS
from ejkernel_pallas.gpu.hopper.lazy_rescaling import rescaled
from ejkernel_pallas.gpu.hopper.registers import of_rows, pair, row_like, scalar
from ejkernel_pallas.gpu.tiled_attention.soft_cap import capped_weights
from ejkernel_pallas.gpu.tiled_attention.spec import Spec

SLACK = 8.0
"""How far, as a power of two, a row's maximum may lie below its largest score where sums fade seldom.

Weights are then at most 256, which leaves float16 room, and they have as many digits as others.
"""


def exponentiate(spec: Spec, scores: Any, peak: Any, total: Any, clear: bool) -> tuple[Any, ...]:
    """Weights of scores, and what they do to their rows.

    Args:
        spec: The kernel's constants.
        scores: Float32 [rows, columns], with the soft cap, and -inf where nothing attends; raw products of a tile that
            is clear if the spec `caps_in_weights`.
        peak: What weights were relative to so far, as a power of two.
        total: Their sums, of a thread's own columns.
        clear: Whether all pairs attend.

    Returns:
        The new `peak` and `total`, the weights, and the factor of all that was summed up before.
    """
    if spec.settled:
        if clear and spec.caps_in_weights:
            weights, sums = capped_weights(spec, scores)
        else:
            weights = jnp.exp2(scores * spec.exponent)
            sums = _own_sum(weights)
        return peak, total + sums, weights, peak
    top = jnp.maximum(peak, scores.max(axis=1) * spec.exponent)
    if spec.fades_seldom:
        top = jnp.where(top - peak > SLACK, top, peak)
    weights = jnp.exp2(scores * spec.exponent - over_columns(top, scores.shape))
    fade = jnp.exp2(peak - top)
    return top, total * fade + _own_sum(weights), weights, fade


def faded(spec: Spec, output: Any, fade: jax.Array) -> jax.Array:
    """The output times a factor for every row; where they fade seldom, only in warps that have a factor below one."""
    if spec.settled:
        return output
    if not spec.fades_seldom:
        return output * over_columns(fade, output.shape)

    return rescaled(output, fade)


def whole_sum(total: jax.Array) -> jax.Array:
    """Sums of rows, of which each of four threads has a part."""

    @plgpu.inline_mgpu(arg_types=(ROWS,), return_type=plgpu.ShapeDtypeStruct(total.shape, jnp.float32, layout=ROWS))
    def add(_: Any, rows: Any) -> Any:
        sums = [scalar(register) for register in rows.registers.flat]
        for distance in (1, 2):
            sums = [arith.addf(part, mgpu.utils.shfl_bfly(part, distance)) for part in sums]
        return of_rows(rows, sums)

    return add(total)  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def _own_sum(weights: jax.Array) -> jax.Array:
    """Sums of rows over the columns that a thread has of them: what four threads have is added once, at the end."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA,),
        return_type=plgpu.ShapeDtypeStruct(weights.shape[:1], jnp.float32, layout=ROWS),
    )
    def add(_: Any, tile: Any) -> Any:
        f32 = ir.F32Type.get()
        sums = [arith.constant(f32, ir.FloatAttr.get(f32, 0.0))] * 2
        for place, register in enumerate(tile.registers.flat):
            for weight in pair(register):
                sums[place % 2] = arith.addf(sums[place % 2], weight)
        return of_rows(row_like(tile, sums[0]), sums)

    return add(weights)  # pyright: ignore[reportCallIssue]  # the decorator gives the context
