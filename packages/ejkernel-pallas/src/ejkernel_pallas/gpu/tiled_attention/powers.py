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

from ejkernel_pallas.gpu.tiled_attention.registers import pair, with_registers

COEFFICIENTS = (0.99992807, 0.69326099, 0.24261112, 0.05517163)
ROUNDS = 1.5 * 2.0**23
"""A number whose sum with another, less than 2**22, has that other one, rounded, in its lowest bits."""
MANTISSA = 23
"""Bits of a float32 before those of its exponent."""


def powers(exponents: jax.Array) -> jax.Array:
    """2 ** x of a float32 tile, for x between -126 and 127."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA,),
        return_type=plgpu.ShapeDtypeStruct(exponents.shape, jnp.float32, layout=plgpu.Layout.WGMMA),
    )
    def run(_: Any, tile: Any) -> Any:
        makers = (_polynomial, _instruction)
        made = [
            vector.from_elements(register.type, [makers[n % 2](x) for x in pair(register)])
            for n, register in enumerate(tile.registers.flat)
        ]
        return with_registers(tile, made)

    return run(exponents)  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def _instruction(x: Any) -> Any:
    return llvm.inline_asm(ir.F32Type.get(), [x], "ex2.approx.ftz.f32 $0, $1;", "=f,f")


def _polynomial(x: Any) -> Any:
    f32, i32 = ir.F32Type.get(), ir.IntegerType.get_signless(32)
    rounds, *coefficients = (arith.constant(f32, ir.FloatAttr.get(f32, c)) for c in (ROUNDS, *COEFFICIENTS))
    rounded = arith.addf(x, rounds)
    rest = arith.subf(x, arith.subf(rounded, rounds))
    value: Any = coefficients[-1]
    for coefficient in coefficients[-2::-1]:
        value = math.fma(value, rest, coefficient)
    exponent = arith.shli(arith.bitcast(i32, rounded), arith.constant(i32, ir.IntegerAttr.get(i32, MANTISSA)))
    return arith.bitcast(f32, arith.addi(arith.bitcast(i32, value), exponent))
