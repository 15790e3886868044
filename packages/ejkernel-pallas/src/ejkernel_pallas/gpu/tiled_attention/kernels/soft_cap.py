"""Computes weights under a soft cap, for tiles of which every pair attends.

    weight = 2 ** (exponent * tanh(x))        x = inner * product

Near zero tanh is a polynomial, and the argument of exp2 takes only four multiplications and additions:

    tanh(x) = a1 x + a3 x^3                   |x| <= 0.4

The coefficients minimise the relative error, 4.0e-4, which is below the error bound of the chip's own tanh, 2**-11. A
warp uses the polynomial if all of its products are near zero. Other warps use the instruction and, since then the
special-function unit is the bottleneck, polynomials for half of the exponentials.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, math, scf, vector

from ejkernel_pallas.gpu.hopper.layouts import ROW_LAYOUT
from ejkernel_pallas.gpu.hopper.powers_of_two import exp2_instruction, exp2_polynomial
from ejkernel_pallas.gpu.hopper.registers import (
    float32_constant,
    int32_constant,
    int32_type,
    replace_registers,
    replace_row_values,
    row_vector_like,
    unpack_pair,
)
from ejkernel_pallas.gpu.tiled_attention.spec import HopperSpec

MAX_POLYNOMIAL_ARGUMENT = 0.4
TANH_COEFFICIENTS = (0.99960171, -0.31317268)
ANY_AT_LEAST_PTX = "{ .reg .pred p; setp.geu.f32 p, $1, $2; vote.sync.any.pred p, p, -1; selp.b32 $0, 1, 0, p; }"
"""PTX: whether a number is at least another one, or NaN, in any thread of the warp."""


def compute_capped_weights(spec: HopperSpec, raw_products: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns unnormalised weights of raw products of queries and keys, and their row sums.

    Args:
        spec: The kernel's constants.
        raw_products: Float32 [rows, columns].

    Returns:
        Weights, float32 [rows, columns], and float32 [rows] with the sums of a thread's own columns. They are added up
        together with the weights: after the branch it takes 4% longer with head dimension 64.
    """

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA,),
        return_type=(
            plgpu.ShapeDtypeStruct(raw_products.shape, jnp.float32, layout=plgpu.Layout.WGMMA),
            plgpu.ShapeDtypeStruct(raw_products.shape[:1], jnp.float32, layout=ROW_LAYOUT),
        ),
    )
    def run(_: Any, tile: Any) -> Any:
        register_type = tile.registers.flat[0].type
        inputs = [product for register in tile.registers.flat for product in unpack_pair(register)]
        # The vote makes the branch uniform in a warp.
        branch: Any = scf.IfOp(
            _any_far_from_zero(spec, inputs), [float32_constant(0.0).type] * (len(inputs) + 2), has_else=True
        )
        for block, weight in (
            (branch.then_block, _softmax_weight_by_tanh),
            (branch.else_block, _softmax_weight_by_polynomial),
        ):
            with ir.InsertionPoint(block):
                scf.yield_(_weights_with_row_sums(functools.partial(weight, spec), inputs))
        *results, linear, second = branch.results
        weights = [vector.from_elements(register_type, results[n : n + 2]) for n in range(0, len(results), 2)]
        return replace_registers(tile, weights), replace_row_values(row_vector_like(tile, linear), [linear, second])

    return run(raw_products)  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def _weights_with_row_sums(compute_weight: Callable[[int, Any], Any], products: list[Any]) -> list[Any]:
    """Returns weights of a thread's products, then the sums of its two rows; pairs of products alternate between the
    rows.
    """
    results, sums = [], [float32_constant(0.0)] * 2
    for n, product in enumerate(products):
        results.append(compute_weight(n, product))
        sums[n // 2 % 2] = arith.addf(sums[n // 2 % 2], results[-1])
    return [*results, *sums]


def _any_far_from_zero(spec: HopperSpec, products: list[Any]) -> Any:
    """Returns whether any product of the warp is not near zero."""
    operands = [
        _max_or_nan([math.absf(product) for product in products]),
        float32_constant(MAX_POLYNOMIAL_ARGUMENT / spec.product_scale),
    ]
    any_at_least: Any = llvm.inline_asm(int32_type(), operands, ANY_AT_LEAST_PTX, "=r,f,f", has_side_effects=True)
    return arith.cmpi(arith.CmpIPredicate.ne, any_at_least, int32_constant(0))


def _max_or_nan(values: list[Any]) -> Any:
    """Returns the maximum, or NaN if there is one. It reduces in pairs, for short dependency chains."""
    while len(values) > 1:
        pairs = zip(values[::2], values[1::2], strict=False)
        values = [arith.maximumf(*both) for both in pairs] + values[len(values) // 2 * 2 :]
    return values[0]


def _softmax_weight_by_polynomial(spec: HopperSpec, _: int, product: Any) -> Any:
    """Returns the unnormalised softmax weight of a product that is near zero, with tanh as a polynomial."""
    linear, cubic = (
        float32_constant(coefficient * spec.product_scale**degree * spec.softmax_scale_log2)
        for coefficient, degree in zip(TANH_COEFFICIENTS, (1, 3), strict=True)
    )
    return exp2_instruction(arith.mulf(product, math.fma(cubic, arith.mulf(product, product), linear)))


def _softmax_weight_by_tanh(spec: HopperSpec, n: int, product: Any) -> Any:
    """Returns the unnormalised softmax weight of any product, the thread's `n`th, by the instruction for tanh."""
    scaled = arith.mulf(product, float32_constant(spec.product_scale))
    # tanh uses the special-function unit for every product, so every second exponential uses the FMA units.
    capped: Any = llvm.inline_asm(scaled.type, [scaled], "tanh.approx.f32 $0, $1;", "=f,f")
    return (
        exp2_instruction(arith.mulf(capped, float32_constant(spec.softmax_scale_log2)))
        if n % 2
        else exp2_polynomial(capped, spec.softmax_scale_log2)
    )
