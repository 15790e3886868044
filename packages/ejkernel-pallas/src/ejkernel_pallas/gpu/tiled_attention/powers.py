"""Powers of two of a tile, half of them without the unit that has the instruction for it.

    2 ** x = 2 ** n * 2 ** f        n = x rounded, -1/2 <= f <= 1/2
    2 ** f = c0 + c1 f + c2 f^2 + c3 f^3

`n` is added to the exponent of the polynomial's value. The coefficients are those of the least relative error, 7.5e-5,
a twenty-fifth of what rounding a weight to bfloat16 costs. Source: Cody and Waite 1980 (reduction of the argument).
"""

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, math, vector

from ejkernel_pallas.gpu.tiled_attention.registers import constant, i32, pair, with_registers

COEFFICIENTS = (0.99992807, 0.69326099, 0.24261112, 0.05517163)
ROUNDS = 1.5 * 2.0**23
"""A number whose sum with another, less than 2**22, has that other one, rounded, in its lowest bits."""
MANTISSA = 23
"""Bits of a float32 before those of its exponent."""
SMALLEST = -125.0
"""Exponent of a float32 that is normal even if the polynomial is a little too small."""


def powers(scores: jax.Array, factor: float, shift: jax.Array | None = None) -> jax.Array:
    """2 ** (scores * factor - shift) of a float32 tile.

    Args:
        scores: So that exponents are at most 127 and, without a shift, at least -125.
        factor: On the scores.
        shift: A tile, or None for zero. Polynomials are then no less than 2 ** -125, about.
    """
    tiles = (scores,) if shift is None else (scores, shift)

    @plgpu.inline_mgpu(
        arg_types=tuple(plgpu.Layout.WGMMA for _ in tiles),
        return_type=plgpu.ShapeDtypeStruct(scores.shape, jnp.float32, layout=plgpu.Layout.WGMMA),
    )
    def run(_: Any, *given: Any) -> Any:
        makers, made = (_polynomial, _instruction), []
        for registers in zip(*(tile.registers.flat for tile in given), strict=True):
            operands = zip(*map(pair, registers), strict=True)
            values = [make(factor, *numbers) for make, numbers in zip(makers, operands, strict=True)]
            made.append(vector.from_elements(registers[0].type, values))
        return with_registers(given[0], made)

    return run(*tiles)  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def _instruction(factor: float, score: Any, shift: Any = None) -> Any:
    exponent = arith.mulf(score, _number(factor)) if shift is None else _exponent(factor, score, shift)
    return llvm.inline_asm(ir.F32Type.get(), [exponent], "ex2.approx.ftz.f32 $0, $1;", "=f,f")


def _polynomial(factor: float, score: Any, shift: Any = None) -> Any:
    if shift is not None:
        score, factor = arith.maximumf(_exponent(factor, score, shift), _number(SMALLEST)), 1.0
    rounded: Any = math.fma(score, _number(factor), _number(ROUNDS))
    rest = math.fma(score, _number(factor), arith.subf(_number(ROUNDS), rounded))
    value: Any = _number(COEFFICIENTS[-1])
    for coefficient in COEFFICIENTS[-2::-1]:
        value = math.fma(value, rest, _number(coefficient))
    exponent = arith.shli(arith.bitcast(i32(), rounded), constant(MANTISSA))
    return arith.bitcast(ir.F32Type.get(), arith.addi(arith.bitcast(i32(), value), exponent))


def _exponent(factor: float, score: Any, shift: Any) -> Any:
    return math.fma(score, _number(factor), arith.negf(shift))


def _number(value: float) -> Any:
    f32 = ir.F32Type.get()
    return arith.constant(f32, ir.FloatAttr.get(f32, value))
