"""Activations and gated linear units on accumulators.

    silu(x) = x / (1 + exp(-alpha x))   gelu(x) = x / (1 + exp(-2 sqrt(2 / pi) (x + 0.044715 x^3))), by its tanh formula

It takes one exponential and one reciprocal per element, both in the special-function unit. Of separate columns, a
thread has the same ones of the gate and of the factor. Of interleaved columns it has neighbouring pairs, so that the
product is its own, too, but the output's columns are elsewhere in the layout:

    lane of four           0       1       2       3
    16 columns of sums     g0 f0   g1 f1   g2 f2   g3 f3   |   g4 f4   g5 f5   g6 f6   g7 f7
    a word of outputs      0, 4    1, 5    2, 6    3, 7         16 bits each
    the layout wants       0, 1    2, 3    4, 5    6, 7         each from two lanes: two shuffles, and a permutation
"""

import math
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from ejkernel.arithmetic import LOG2E
from ejkernel.families.gated_grouped_matmul import GateParameters
from ejkernel_pallas.gpu.hopper.layouts import ROW_LAYOUT
from ejkernel_pallas.gpu.hopper.registers import (
    float32_constant,
    int32_constant,
    int32_type,
    replace_registers,
    unpack_pair,
    unpack_row_value,
)

GELU_TANH_FACTOR = 2 * math.sqrt(2 / math.pi)
"""Twice the factor of the argument in the tanh formula of gelu: tanh(x) is 2 / (1 + exp(-2 x)) - 1."""
GELU_CUBIC_FACTOR = 0.044715
# Overflow is harmless: the reciprocal of infinity is 0.
MULTIPLY_BY_SIGMOID_PTX = """{
.reg .f32 power;
ex2.approx.ftz.f32 power, $2;
add.f32 power, power, 0f3F800000;
rcp.approx.ftz.f32 power, power;
mul.f32 $0, $1, power;
}"""
LANES_PER_ROW = 4
"""Lanes that share the columns of a row."""
# Lanes exchange words among four: bits 8 to 12 of the last operand but one are the mask of the upper bits of a lane.
SHUFFLE_IN_QUAD_PTX = "shfl.sync.idx.b32 $0, $1, $2, 0x1c1f, 0xffffffff;"
SELECT_LOW_HALVES, SELECT_HIGH_HALVES = 0x5410, 0x7632
"""Selectors of `prmt` that put two words' lower or upper halves into one word."""


def apply_activation(tile: jax.Array, activation: GateParameters, row_validity: jax.Array | None = None) -> jax.Array:
    """Returns `act(tile)` of a float32 tile in an accumulator's layout, for products without a gate.

    Args:
        tile: [64, N].
        activation: The activation.
        row_validity: Float32 [64], 0 for rows whose output is 0; None if there are none.
    """
    return _map_elements((tile,), row_validity, lambda x: _activate(x, activation))


def apply_gate(
    gate: jax.Array, factor: jax.Array, activation: GateParameters, row_validity: jax.Array | None = None
) -> jax.Array:
    """Returns `act(gate) * (factor + beta)` of two float32 tiles in an accumulator's layout, both limited.

    Args:
        gate: [64, N].
        factor: [64, N].
        activation: The activation, alpha, beta and limit.
        row_validity: Float32 [64], 0 for rows whose output is 0; None if there are none.
    """
    return _map_elements((gate, factor), row_validity, lambda x, y: _activate_and_multiply(x, y, activation))


def _map_elements(tiles: tuple[jax.Array, ...], row_validity: jax.Array | None, combine_elements: Any) -> jax.Array:
    """Returns a tile of the combined elements of tiles in an accumulator's layout."""
    masks = () if row_validity is None else (row_validity,)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA,) * len(tiles) + (ROW_LAYOUT,) * len(masks),
        return_type=plgpu.ShapeDtypeStruct(tiles[0].shape, jnp.float32, layout=plgpu.Layout.WGMMA),
    )
    def run(_: Any, *operands: Any) -> Any:
        sums, row_masks = operands[: len(tiles)], _unpack_row_validity(operands[len(tiles) :])
        new_registers: list[Any] = []
        # Registers alternate between a thread's two rows.
        for index, registers in enumerate(zip(*(tile.registers.flat for tile in sums), strict=True)):
            scalars = zip(*(unpack_pair(register) for register in registers), strict=True)
            values = [_zero_unless_valid(combine_elements(*elements), row_masks[index % 2]) for elements in scalars]
            new_registers.append(vector.from_elements(registers[0].type, values))
        return replace_registers(sums[0], new_registers)

    return run(*tiles, *masks)  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def apply_gate_to_interleaved_columns(
    interleaved_sums: jax.Array, activation: GateParameters, dtype: Any, row_validity: jax.Array | None = None
) -> jax.Array:
    """Returns what `apply_gate` does for gate `interleaved_sums[:, ::2]` and factor `interleaved_sums[:, 1::2]`, in 16
    bits and in an accumulator's layout.

    Args:
        interleaved_sums: Float32 [64, 2 N], N a multiple of 8.
        activation: The activation, alpha, beta and limit.
        dtype: bfloat16 or float16.
        row_validity: Float32 [64], 0 for rows whose output is 0; None if there are none.
    """
    shape = interleaved_sums.shape[0], interleaved_sums.shape[1] // 2
    masks = () if row_validity is None else (row_validity,)
    kind = "bf16x2" if jnp.dtype(dtype) == jnp.bfloat16 else "f16x2"

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA,) + (ROW_LAYOUT,) * len(masks),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.dtype(dtype), layout=plgpu.Layout.WGMMA),
    )
    def run(_: Any, sums: Any, *operands: Any) -> Any:
        registers, row_masks = list(sums.registers.flat), _unpack_row_validity(operands)
        element = ir.BF16Type.get() if kind == "bf16x2" else ir.F16Type.get()
        zero = arith.constant(element, ir.FloatAttr.get(element, 0.0))
        like = mgpu.FragmentedArray.splat(zero, shape, layout=mgpu.WGMMA_LAYOUT, is_signed=None)
        sources, selector = _quad_source_lanes_of_thread()
        new_registers: list[Any] = []
        # A register has a pair of columns of one of the thread's two rows; eight columns later follows the next pair.
        for index, like_register in enumerate(like.registers.flat):
            block, row = divmod(index, 2)
            low, high = (
                _zero_unless_valid(
                    _activate_and_multiply(*unpack_pair(registers[2 * (2 * block + half) + row]), activation),
                    row_masks[row],
                )
                for half in range(2)
            )
            code = f"cvt.rn.{kind}.f32 $0, $2, $1;"  # the first source becomes the upper half
            word: Any = llvm.inline_asm(int32_type(), [low, high], code, "=r,f,f")
            halves: list[Any] = [
                llvm.inline_asm(int32_type(), [word, source], SHUFFLE_IN_QUAD_PTX, "=r,r,r", has_side_effects=True)
                for source in sources
            ]
            word = llvm.inline_asm(int32_type(), [*halves, selector], "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r")
            word = vector.from_elements(ir.VectorType.get((1,), int32_type()), [word])
            new_registers.append(vector.bitcast(like_register.type, word))
        return replace_registers(like, new_registers)

    return run(interleaved_sums, *masks)  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def quad_source_lanes(lane: int) -> tuple[tuple[int, int], int]:
    """Returns the lanes of four whose words have the outputs of a lane's two columns of eight, and the selector of
    their halves: lane q's word has outputs q and q + 4, and the layout wants 2 q and 2 q + 1 there.
    """
    column = 2 * lane
    return (
        (column % LANES_PER_ROW, (column + 1) % LANES_PER_ROW),
        SELECT_LOW_HALVES if column < LANES_PER_ROW else SELECT_HIGH_HALVES,
    )


def _quad_source_lanes_of_thread() -> tuple[list[Any], Any]:
    """Returns `quad_source_lanes` of this thread's lane."""
    lane, choices = (
        arith.remui(mgpu.utils.thread_idx(), int32_constant(LANES_PER_ROW)),
        map(quad_source_lanes, range(4)),
    )
    chosen: list[Any] = []
    for number_of_lane, ((first, second), selector) in enumerate(choices):
        values = [int32_constant(value) for value in (first, second, selector)]
        is_lane = arith.cmpi(arith.CmpIPredicate.eq, lane, int32_constant(number_of_lane))
        chosen = [arith.select(is_lane, *both) for both in zip(values, chosen, strict=True)] if chosen else values
    return chosen[:2], chosen[2]


def _unpack_row_validity(row_validity: Any) -> list[Any]:
    """Returns for each of a thread's two rows whether its output is not 0; None for yes."""
    if not row_validity:
        return [None, None]
    is_valid = [unpack_row_value(x) for x in row_validity[0].registers.flat]
    return [arith.cmpf(arith.CmpFPredicate.ONE, x, float32_constant(0.0)) for x in is_valid]


def _zero_unless_valid(x: Any, is_valid: Any) -> Any:
    return x if is_valid is None else arith.select(is_valid, x, float32_constant(0.0))


def _activate_and_multiply(gate: Any, factor: Any, activation: GateParameters) -> Any:
    """Returns the activation of the gate times the factor."""
    if activation.limit is not None:
        # These propagate NaN.
        gate = arith.minimumf(gate, float32_constant(activation.limit))
        factor = arith.maximumf(
            arith.minimumf(factor, float32_constant(activation.limit)), float32_constant(-activation.limit)
        )
    if activation.beta:
        factor = arith.addf(factor, float32_constant(activation.beta))
    return arith.mulf(_activate(gate, activation), factor)


def _activate(x: Any, activation: GateParameters) -> Any:
    if activation.activation == "relu2":
        x = arith.maximumf(x, float32_constant(0.0))
        return arith.mulf(x, x)
    if activation.activation == "silu":
        exponent = arith.mulf(x, float32_constant(-LOG2E * activation.alpha))
    else:
        cubic_term = arith.addf(
            arith.mulf(arith.mulf(x, x), float32_constant(GELU_CUBIC_FACTOR)), float32_constant(1.0)
        )
        exponent = arith.mulf(arith.mulf(x, cubic_term), float32_constant(-GELU_TANH_FACTOR * LOG2E))
    return llvm.inline_asm(ir.F32Type.get(), [x, exponent], MULTIPLY_BY_SIGMOID_PTX, "=f,f,f")
