"""exp2 of a tile, half of it by polynomials instead of the special-function unit.

    2 ** x = 2 ** n * 2 ** f        n = x rounded, -1/2 <= f <= 1/2
    2 ** f = c0 + c1 f + c2 f^2 + c3 f^3

`n` is added to the exponent of the polynomial's value. The coefficients minimise the relative error, 7.5e-5, a
twenty-fifth of the error of rounding a weight to bfloat16. Source: Cody and Waite 1980 (range reduction).
"""

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, math, vector

from ejkernel_pallas.gpu.hopper.registers import (
    float32_constant,
    int32_constant,
    int32_type,
    replace_registers,
    unpack_pair,
)

EXP2_COEFFICIENTS = (0.99992807, 0.69326099, 0.24261112, 0.05517163)
ROUNDING_CONSTANT = 1.5 * 2.0**23
"""Adding this to a number below 2**22 leaves the rounded number in the sum's lowest bits."""
MANTISSA_BITS = 23
"""Mantissa bits of a float32."""
MIN_EXPONENT = -125.0
"""The smallest exponent with a normal result, even if the polynomial is slightly too small."""


def exp2_of_scores(scores: jax.Array, factor: float, shift: jax.Array) -> jax.Array:
    """Returns 2 ** (scores * factor - shift) of a float32 tile.

    Args:
        scores: Scores for which exponents are at most 127; polynomial results are clamped to about 2 ** -125.
        factor: Factor on the scores.
        shift: A tile.
    """

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA, plgpu.Layout.WGMMA),
        return_type=plgpu.ShapeDtypeStruct(scores.shape, jnp.float32, layout=plgpu.Layout.WGMMA),
    )
    def run(_: Any, scores: Any, shift: Any) -> Any:
        new_registers: list[Any] = []
        for registers in zip(scores.registers.flat, shift.registers.flat, strict=True):
            # Of two neighbours one uses the FMA units and one the special-function unit, which work in parallel. The
            # split is by register, so no thread branches.
            first, fma_inputs = zip(*map(unpack_pair, registers), strict=True)
            # Below MIN_EXPONENT the addition to the exponent would overflow into the sign.
            polynomial_values = exp2_polynomial(
                arith.maximumf(_exponent(factor, *first), float32_constant(MIN_EXPONENT)), 1.0
            )
            values = [polynomial_values, exp2_instruction(_exponent(factor, *fma_inputs))]
            new_registers.append(vector.from_elements(registers[0].type, values))
        return replace_registers(scores, new_registers)

    return run(scores, shift)  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def exp2_instruction(exponent: Any) -> Any:
    """Returns 2 ** exponent of one float32."""
    return llvm.inline_asm(ir.F32Type.get(), [exponent], "ex2.approx.ftz.f32 $0, $1;", "=f,f")


def exp2_polynomial(score: Any, factor: float) -> Any:
    """Returns 2 ** (score * factor) of one float32, with an exponent of -125 to 127."""
    # Next to ROUNDING_CONSTANT, a float32 has no bits for fractions: the sum's lowest bits are the rounded integer n.
    rounded: Any = math.fma(score, float32_constant(factor), float32_constant(ROUNDING_CONSTANT))
    # The fraction f. The subtraction is exact, and the multiply-add rounds once.
    fraction = math.fma(score, float32_constant(factor), arith.subf(float32_constant(ROUNDING_CONSTANT), rounded))
    value: Any = float32_constant(EXP2_COEFFICIENTS[-1])
    for coefficient in EXP2_COEFFICIENTS[-2::-1]:
        value = math.fma(value, fraction, float32_constant(coefficient))
    # The shift drops the bits of ROUNDING_CONSTANT, so only n is added to the exponent, as an integer.
    exponent = arith.shli(arith.bitcast(int32_type(), rounded), int32_constant(MANTISSA_BITS))
    return arith.bitcast(ir.F32Type.get(), arith.addi(arith.bitcast(int32_type(), value), exponent))


def _exponent(factor: float, score: Any, shift: Any) -> Any:
    return math.fma(score, float32_constant(factor), arith.negf(shift))
