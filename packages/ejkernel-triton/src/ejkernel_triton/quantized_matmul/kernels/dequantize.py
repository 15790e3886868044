"""Device helpers of the quantised matmul's kernels: codes and scales of a packed matrix, dequantised in registers."""

import triton
import triton.language as tl

from ejkernel_triton.blocks import round_bfloat16


@triton.jit
def decode_float(bits, EXPONENT_BIAS: tl.constexpr, MANTISSA_BITS: tl.constexpr, SIGN_BIT: tl.constexpr):
    """Converts a float of few bits, sign on top, to float32: shifts its bits and replaces the exponent's bias.

    A subnormal is its mantissa times the smallest power of two. Float32 subnormals would take fewer instructions, but
    devices may flush them to zero.
    """
    # Moves the code's exponent and mantissa to the low end of float32's exponent and the top of its mantissa.
    shifted_bits = (bits & (SIGN_BIT - 1)) << (23 - MANTISSA_BITS)
    # A subnormal has no implicit 1: it is read with the smallest normal exponent, and the 1 is subtracted again.
    normal = (shifted_bits + ((127 - EXPONENT_BIAS) << 23)).to(tl.float32, bitcast=True)
    subnormal = (shifted_bits + ((128 - EXPONENT_BIAS) << 23)).to(tl.float32, bitcast=True) - 2.0 ** (1 - EXPONENT_BIAS)
    value = tl.where(shifted_bits < (1 << 23), subnormal, normal)
    return tl.where((bits & SIGN_BIT) != 0, -value, value)


@triton.jit
def load_scales(scales, zero_points, rows, tile, spec: tl.constexpr):
    """Loads the stored scales of a tile of words, and the zeros of affine codes: one per group.

    They are loaded one tile before their use. A load outside of the pipeline that every step waited for would take the
    whole time of a step.
    """
    WORDS_PER_GROUP: tl.constexpr = spec.CODES_PER_SCALE // spec.CODES_PER_WORD
    GROUPS_PER_TILE: tl.constexpr = (spec.BLOCK_W + WORDS_PER_GROUP - 1) // WORDS_PER_GROUP
    groups = tile * spec.BLOCK_W // WORDS_PER_GROUP + tl.arange(0, GROUPS_PER_TILE)
    # Out of bounds words and scales are 0, since code 0 may stand for a value other than 0. An e8m0 of 0 is not 0, but
    # code 0 of its formats is.
    mask = (rows < spec.R)[:, None] & (groups < spec.SCALES_PER_ROW)[None, :]
    at = rows[:, None] * spec.SCALES_PER_ROW + groups[None, :]
    stored_scales = tl.load(scales + at, mask=mask, other=0)
    if spec.CODES_ARE_INTEGERS and not spec.SHARED_ZERO_POINT:
        return stored_scales, tl.load(zero_points + at, mask=mask, other=0)
    else:
        return stored_scales, stored_scales


@triton.jit
def broadcast_groups_to_words(x, spec: tl.constexpr):
    """Returns values of groups [BLOCK_R, groups] for each of the groups' words, [BLOCK_R, BLOCK_W]."""
    WORDS_PER_GROUP: tl.constexpr = spec.CODES_PER_SCALE // spec.CODES_PER_WORD
    R: tl.constexpr = spec.BLOCK_R
    W: tl.constexpr = spec.BLOCK_W
    if W <= WORDS_PER_GROUP:
        return tl.broadcast_to(x, [R, W])
    else:
        return tl.reshape(tl.broadcast_to(x[:, :, None], [R, W // WORDS_PER_GROUP, WORDS_PER_GROUP]), [R, W])


@triton.jit
def compute_scale_and_offset(stored_scales, zero_points, spec: tl.constexpr):
    """Returns scales of every word, float32 [BLOCK_R, BLOCK_W]; for affine codes f and o of `f * (1 + q / 2 **
    BITS_PER_CODE) - o`.
    """
    if spec.SCALES_ARE_E8M0:
        # e8m0: the byte is the exponent field of a float32, except for 2 ** -127, which is subnormal, and 255 for NaN.
        exponent = stored_scales.to(tl.int32)
        bits = tl.where(exponent == 0, 0x00400000, tl.where(exponent == 255, 0x7FC00000, exponent << 23))
        scale = bits.to(tl.float32, bitcast=True)
    elif spec.SCALES_ARE_E4M3:
        scale = decode_float(stored_scales.to(tl.int32), 7, 3, 128)
    else:
        scale = stored_scales.to(tl.float32)
    if spec.CODES_ARE_INTEGERS:
        # f * (2 ** BITS_PER_CODE s) - (2 ** BITS_PER_CODE s + z s) = q s - z s: the 1 of the mantissa is part of the
        # offset.
        scaled_by_codes = scale * (1 << spec.BITS_PER_CODE)
        if spec.SHARED_ZERO_POINT:
            word_scales = broadcast_groups_to_words(scaled_by_codes, spec)
            return word_scales, word_scales * (1 + spec.SHARED_ZERO_POINT / (1 << spec.BITS_PER_CODE))
        return broadcast_groups_to_words(scaled_by_codes, spec), broadcast_groups_to_words(
            scaled_by_codes + scale * zero_points.to(tl.float32), spec
        )
    else:
        word_scales = broadcast_groups_to_words(scale, spec)
        return word_scales, word_scales


@triton.jit
def dequantize_code(packed, scale, offset, nf4_table, CODE_INDEX: tl.constexpr, spec: tl.constexpr):
    """Dequantises code CODE_INDEX of every word, to the dtype of the product's operands."""
    if spec.CODES_ARE_INTEGERS:
        # The code becomes the top of the mantissa of 1: f = 1 + q / 2 ** BITS_PER_CODE, and one multiply-add
        # dequantises it. Conversions of integers to floats run at a quarter of the rate of multiply-adds.
        SHIFT: tl.constexpr = 23 - (CODE_INDEX + 1) * spec.BITS_PER_CODE
        MASK: tl.constexpr = ((1 << spec.BITS_PER_CODE) - 1) << (23 - spec.BITS_PER_CODE)
        # SHIFT moves the code's top bit to bit 22. A right shift extends the sign; MASK clears it.
        shifted_bits = packed << SHIFT if SHIFT >= 0 else packed >> -SHIFT
        value = ((shifted_bits & MASK) | 0x3F800000).to(tl.float32, bitcast=True) * scale - offset
    elif spec.HAS_CODE_TABLE:
        bits = (packed >> (CODE_INDEX * spec.BITS_PER_CODE)) & ((1 << spec.BITS_PER_CODE) - 1)
        # A gather from a table of 16 values, which stays in L1.
        value = tl.load(nf4_table + bits) * scale
    elif spec.BITS_PER_CODE == 4:
        value = decode_float(packed >> (CODE_INDEX * spec.BITS_PER_CODE), 1, 1, 8) * scale
    else:
        value = decode_float(packed >> (CODE_INDEX * spec.BITS_PER_CODE), 7, 3, 128) * scale
    if spec.OPERAND_DTYPE == "float32":
        return value
    elif spec.OPERAND_DTYPE == "bfloat16":
        if spec.WIDEN_TO_FLOAT32:  # the interpreter's cast truncates
            value = round_bfloat16(value)
        return value.to(tl.bfloat16)
    else:
        return value.to(tl.float16)


@triton.jit
def store_split_sum(split_sums, acc, code_index, m, columns, WIDTH: tl.constexpr, spec: tl.constexpr):
    """Stores a split's tile of outputs."""
    at = (code_index * spec.M + m)[:, None] * WIDTH + columns[None, :]
    tl.store(split_sums + at, acc, mask=(m < spec.M)[:, None] & (columns < WIDTH)[None, :])


@triton.jit
def locate_program(program, NUM_COLUMN_TILES: tl.constexpr, spec: tl.constexpr):
    """Returns the batch row, split, tile of columns and tile of rows of a program.

    Consecutive programs share words, which they read from L2.
    """
    NUM_OUTPUT_ROW_TILES: tl.constexpr = (spec.M + spec.BLOCK_M - 1) // spec.BLOCK_M
    row = program % NUM_OUTPUT_ROW_TILES
    column = program // NUM_OUTPUT_ROW_TILES % NUM_COLUMN_TILES
    split_index = program // (NUM_OUTPUT_ROW_TILES * NUM_COLUMN_TILES) % spec.NUM_SPLITS
    return (
        tl.cast(program // (NUM_OUTPUT_ROW_TILES * NUM_COLUMN_TILES * spec.NUM_SPLITS), tl.int64),
        split_index,
        column,
        row,
    )
