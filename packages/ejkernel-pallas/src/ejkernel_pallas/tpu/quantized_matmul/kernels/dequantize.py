"""Dequantization in registers.

    word j of a row:   | code 8j+7 | ... | code 8j+1 | code 8j |       4 bits per code

Code n of all words of a tile forms a tile of its own, one shift away from the words: no element moves between lanes. A
row has few scales; a gather in each register gives every word's lane the scale of its group, once for all codes of the
word. Codes that are indices in a table of 16 values are looked up with a gather, too.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from ejkernel.planning.quantized_formats import NF4, Format
from ejkernel_pallas.tpu.mosaic.vectors import LANES
from ejkernel_pallas.tpu.quantized_matmul.spec import QuantizedSpec


class ScalesAndZeros(NamedTuple):
    """Scales and zeros of a tile's rows, one per group or one per word: float32, or int32 for `dequantize_pair`.

    Attributes:
        scales: The scales.
        zeros: The zeros of affine codes; None for other codes.
    """

    scales: jax.Array
    zeros: jax.Array | None


def make_codebook(quantized_format: Format) -> jax.Array | None:
    """Returns the table of values for codes that are indices in one, float32 [1, 128]."""
    return jnp.tile(jnp.asarray(NF4, jnp.float32), LANES // len(NF4))[None] if quantized_format.mode == "nf4" else None


def decode_small_float(encoded: jax.Array, exponent_bits: int, mantissa_bits: int) -> jax.Array:
    """Decodes floats of few bits, given as int32, to float32.

    A subnormal is computed as its mantissa times the smallest power of two, because TPUs have no float32 subnormals.
    """
    bias, sign = 2 ** (exponent_bits - 1) - 1, 1 << (exponent_bits + mantissa_bits)
    moved = (encoded & (sign - 1)) << (23 - mantissa_bits)
    normal = lax.bitcast_convert_type(moved + ((127 - bias) << 23), jnp.float32)
    subnormal = lax.bitcast_convert_type(moved + ((128 - bias) << 23), jnp.float32) - 2.0 ** (1 - bias)
    value = jnp.where(moved < (1 << 23), subnormal, normal)
    return jnp.where((encoded & sign) != 0, -value, value)


def decode_scales(stored: jax.Array, quantized_format: Format) -> jax.Array:
    """Returns scales, or zeros, as float32."""
    if jnp.issubdtype(stored.dtype, jnp.floating):
        return stored.astype(jnp.float32)
    bits = stored.astype(jnp.int32)
    if quantized_format.integers or quantized_format.mode == "fp8":
        return decode_small_float(bits, 5, 10)
    if quantized_format.has_power_of_two_scales:
        # e8m0: the byte is the exponent field of a float32, and 255 is NaN. 2 ** -127 becomes 0, since TPUs flush
        # subnormals to zero.
        return lax.bitcast_convert_type(jnp.where(bits == 255, 0x7FC00000, bits << 23), jnp.float32)
    return decode_small_float(bits, 4, 3)


def spread_groups_over_words(group_values: jax.Array, first_word: Any, spec: QuantizedSpec) -> jax.Array:
    """Returns the values of groups [rows, 128] for each of 128 words, beginning at word `first_word` of the tile."""
    word = first_word + lax.broadcasted_iota(jnp.int32, group_values.shape, 1)
    group = lax.shift_right_logical(word, jnp.int32(spec.words_per_group.bit_length() - 1)) & (LANES - 1)
    return jnp.take_along_axis(group_values, group, axis=1, mode="promise_in_bounds")


def bfloat16_pairs(x: jax.Array) -> jax.Array:
    """Returns int32 elements whose halves are both the same float32 number, rounded to bfloat16."""
    bits = lax.bitcast_convert_type(x.astype(jnp.bfloat16).astype(jnp.float32), jnp.int32)
    return bits | lax.shift_right_logical(bits, jnp.int32(16))


def dequantize_pair(words: jax.Array, n: int, scales_and_zeros: ScalesAndZeros, spec: QuantizedSpec) -> jax.Array:
    """Returns codes n and n + 4 of every word, of 4 bits each, dequantized in bfloat16: [2 * rows, 128].

    Row 2 i has code n of the words of row i, and row 2 i + 1 their other code: a register's element of 32 bits holds
    two rows, and every instruction takes both. A code becomes a number without a conversion: the bits 0x4300 | code are
    the bfloat16 number 128 + code.

    Scales and zeros are rounded to bfloat16, and so are the difference and its product with the scale.

    Args:
        words: int32 [rows, 128].
        n: Index of the first code in its word, 0 to 3.
        scales_and_zeros: `bfloat16_pairs` of the scales and zeros of every word.
        spec: The kernel's constants.
    """
    shift = n * spec.format.bits
    code = (lax.shift_right_logical(words, jnp.int32(shift)) if shift else words) & 0x000F000F
    # Exact, as the codes are integers.
    value = pltpu.bitcast(code | 0x43004300, jnp.bfloat16)
    value = value - jnp.asarray(128 + (spec.format.symmetric_zero_point or 0), jnp.bfloat16)
    if scales_and_zeros.zeros is not None:
        value = value - pltpu.bitcast(scales_and_zeros.zeros, jnp.bfloat16)
    return value * pltpu.bitcast(scales_and_zeros.scales, jnp.bfloat16)


def dequantize_codes(
    words: jax.Array, n: int, scales_and_zeros: ScalesAndZeros, codebook: jax.Array | None, spec: QuantizedSpec
) -> jax.Array:
    """Returns code n of every word, dequantized, in the dtype of products.

    Args:
        words: int32 [rows, 128].
        n: Index of the code in its word.
        scales_and_zeros: Scales and zeros of every word.
        codebook: The table, [rows, 128], for codes that are indices in one.
        spec: The kernel's constants.
    """
    bits = spec.format.bits
    # A logical shift leaves no bits above the last code, so only the others need a mask.
    code = lax.shift_right_logical(words, jnp.int32(n * bits)) if n else words
    if n + 1 < spec.codes_per_word:
        code = code & ((1 << bits) - 1)
    if scales_and_zeros.zeros is not None:
        # Computed in float32 and rounded once, after the scale, as the reference dequantizes.
        value = code.astype(jnp.float32) - scales_and_zeros.zeros
    elif spec.format.symmetric_zero_point is not None:
        value = (code - spec.format.symmetric_zero_point).astype(jnp.float32)
    elif codebook is not None:
        value = jnp.take_along_axis(codebook, code, axis=1, mode="promise_in_bounds")
    else:
        value = decode_small_float(code, *((4, 3) if bits == 8 else (2, 1)))
    return (value * scales_and_zeros.scales).astype(spec.operand_dtype)
