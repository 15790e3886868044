"""Gated linear units on accumulators: one half of the columns gates the other half.

    silu(x) = x / (1 + exp(-x))         gelu(x) = x / (1 + exp(-2 sqrt(2 / pi) (x + 0.044715 x^3))), by its tanh formula

It takes one exponential and one reciprocal per element, both in the special-function unit.
"""

import math
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from ejkernel.arithmetic import LOG2E
from ejkernel_pallas.gpu.hopper.registers import number, pair, with_registers

TANH_FACTOR = 2 * math.sqrt(2 / math.pi)
"""Twice the factor of the argument in the tanh formula of gelu: tanh(x) is 2 / (1 + exp(-2 x)) - 1."""
CUBIC_FACTOR = 0.044715
# Overflow is harmless: the reciprocal of infinity is 0.
MULTIPLY_BY_SIGMOID_PTX = """{
.reg .f32 power;
ex2.approx.ftz.f32 power, $2;
add.f32 power, power, 0f3F800000;
rcp.approx.ftz.f32 power, power;
mul.f32 $0, $1, power;
}"""


def gated(gate: jax.Array, other: jax.Array, activation: str) -> jax.Array:
    """Returns `act(gate) * other` of two float32 tiles in an accumulator's layout.

    Args:
        gate: [64, N].
        other: [64, N].
        activation: `"silu"` or `"gelu"`.
    """

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA, plgpu.Layout.WGMMA),
        return_type=plgpu.ShapeDtypeStruct(gate.shape, jnp.float32, layout=plgpu.Layout.WGMMA),
    )
    def run(_: Any, gate: Any, other: Any) -> Any:
        new_registers: list[Any] = []
        for gate_register, other_register in zip(gate.registers.flat, other.registers.flat, strict=True):
            scalars = zip(pair(gate_register), pair(other_register), strict=True)
            values = [arith.mulf(_activate(x, activation), y) for x, y in scalars]
            new_registers.append(vector.from_elements(gate_register.type, values))
        return with_registers(gate, new_registers)

    return run(gate, other)  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def _activate(x: Any, activation: str) -> Any:
    if activation == "silu":
        exponent = arith.mulf(x, number(-LOG2E))
    else:
        cubic_term = arith.addf(arith.mulf(arith.mulf(x, x), number(CUBIC_FACTOR)), number(1.0))
        exponent = arith.mulf(arith.mulf(x, cubic_term), number(-TANH_FACTOR * LOG2E))
    return llvm.inline_asm(ir.F32Type.get(), [x, exponent], MULTIPLY_BY_SIGMOID_PTX, "=f,f,f")
