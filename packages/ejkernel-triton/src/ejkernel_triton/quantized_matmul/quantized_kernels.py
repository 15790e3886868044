# pyright: basic, reportIndexIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalMemberAccess=false, reportGeneralTypeIssues=false
"""Products with a packed matrix [R, C], C codes in W words of PER codes: codes are dequantised in registers.

    word j of a row:   | code 8j+7 | ... | code 8j+1 | code 8j |       4 bits a code, PER = 8

No kernel restores the order of codes, which would move every element between threads. Code n of all words of a tile is
a tile [BLOCK_R, BLOCK_W] by itself, one shift away from the words:

    over rows    out[:, 8j + n] += x[:, rows] tile_n            PER accumulators, one for each n
    over words   out[:, rows]   += x[:, 8j + n] tile_n^T        one accumulator, PER products; x arrives by n

    pipeline: packed words, x (num_stages copies in flight) -> shift, mask, scale in registers -> MMA -> accumulators
              scales, zeros (loaded one tile before their use)

Both kernels are split-K: each program contracts a part of the axis and stores float32 sums, which XLA adds in a fixed
order, so every run gives the same bits.
"""

import triton
import triton.language as tl

from ejkernel_triton.blocks import add_dot, at_batch, round_bfloat16


@triton.jit
def decode_float(bits, BIAS: tl.constexpr, MANTISSA: tl.constexpr, SIGN: tl.constexpr):
    """Converts a float of few bits, sign on top, to float32: shifts its bits and replaces the exponent's bias.

    The value of a subnormal is what its mantissa adds to the smallest power of two. Float32 subnormals would take
    fewer instructions, but devices may flush them to zero.
    """
    # The code's exponent and mantissa, where float32 has the low end of its exponent and the top of its mantissa.
    shifted = (bits & (SIGN - 1)) << (23 - MANTISSA)
    # A subnormal has no implicit 1: read with the least normal exponent, that 1 is subtracted again.
    normal = (shifted + ((127 - BIAS) << 23)).to(tl.float32, bitcast=True)
    subnormal = (shifted + ((128 - BIAS) << 23)).to(tl.float32, bitcast=True) - 2.0 ** (1 - BIAS)
    value = tl.where(shifted < (1 << 23), subnormal, normal)
    return tl.where((bits & SIGN) != 0, -value, value)


@triton.jit
def load_scales(scales, zeros, rows, tile, spec: tl.constexpr):
    """What is stored of the scales of a tile of words, and of the zeros of affine codes: one number a group.

    They are loaded one tile before their use. A load outside of the pipeline that every step waits for took the whole
    time of a step.
    """
    WORDS_PER_GROUP: tl.constexpr = spec.GROUP // spec.PER  # words of a group
    COUNT: tl.constexpr = (spec.BLOCK_W + WORDS_PER_GROUP - 1) // WORDS_PER_GROUP
    groups = tile * spec.BLOCK_W // WORDS_PER_GROUP + tl.arange(0, COUNT)
    # Past the ends words and scales are 0, since code 0 may stand for another number than 0. An e8m0 of 0 is not 0, but
    # code 0 of its formats is.
    mask = (rows < spec.R)[:, None] & (groups < spec.GROUPS)[None, :]
    at = rows[:, None] * spec.GROUPS + groups[None, :]
    stored = tl.load(scales + at, mask=mask, other=0)
    if spec.AFFINE and not spec.CENTER:
        return stored, tl.load(zeros + at, mask=mask, other=0)
    else:
        return stored, stored


@triton.jit
def spread_over_words(x, spec: tl.constexpr):
    """Broadcasts values of groups [BLOCK_R, groups] to their words [BLOCK_R, BLOCK_W]."""
    WORDS_PER_GROUP: tl.constexpr = spec.GROUP // spec.PER
    R: tl.constexpr = spec.BLOCK_R
    W: tl.constexpr = spec.BLOCK_W
    if W <= WORDS_PER_GROUP:
        return tl.broadcast_to(x, [R, W])
    else:
        return tl.reshape(tl.broadcast_to(x[:, :, None], [R, W // WORDS_PER_GROUP, WORDS_PER_GROUP]), [R, W])


@triton.jit
def factors(stored, zeros, spec: tl.constexpr):
    """Scales of every word, float32 [BLOCK_R, BLOCK_W]; of affine codes f and o of `f * (1 + q / 2 ** BITS) - o`."""
    if spec.EXPONENT:
        # e8m0: the byte is the exponent field of a float32, but for 2 ** -127, which is subnormal, and 255 for NaN.
        exponent = stored.to(tl.int32)
        bits = tl.where(exponent == 0, 0x00400000, tl.where(exponent == 255, 0x7FC00000, exponent << 23))
        scale = bits.to(tl.float32, bitcast=True)
    elif spec.SCALE8:
        scale = decode_float(stored.to(tl.int32), 7, 3, 128)
    else:
        scale = stored.to(tl.float32)
    if spec.AFFINE:
        # f * (2 ** BITS s) - (2 ** BITS s + z s) = q s - z s: the 1 of the mantissa is part of the offset.
        factor = scale * (1 << spec.BITS)
        if spec.CENTER:
            every = spread_over_words(factor, spec)
            return every, every * (1 + spec.CENTER / (1 << spec.BITS))
        return spread_over_words(factor, spec), spread_over_words(factor + scale * zeros.to(tl.float32), spec)
    else:
        every = spread_over_words(scale, spec)
        return every, every


@triton.jit
def dequantize(packed, scale, offset, table, CODE: tl.constexpr, spec: tl.constexpr):
    """Dequantises code number CODE of every word, to the dtype of the product's operands."""
    if spec.AFFINE:
        # The code becomes the top of the mantissa of 1: f = 1 + q / 2 ** BITS, and one multiply-add dequantises it.
        # Conversions of integers to floats run at a quarter of the rate of multiply-adds.
        SHIFT: tl.constexpr = 23 - (CODE + 1) * spec.BITS
        MASK: tl.constexpr = ((1 << spec.BITS) - 1) << (23 - spec.BITS)
        # SHIFT moves the code's top bit to bit 22. A shift to the right drags the sign in; MASK takes it off.
        shifted = packed << SHIFT if SHIFT >= 0 else packed >> -SHIFT
        value = ((shifted & MASK) | 0x3F800000).to(tl.float32, bitcast=True) * scale - offset
    elif spec.TABLE:
        bits = (packed >> (CODE * spec.BITS)) & ((1 << spec.BITS) - 1)
        # A gather from 16 numbers, which stay in L1.
        value = tl.load(table + bits) * scale
    elif spec.BITS == 4:
        value = decode_float(packed >> (CODE * spec.BITS), 1, 1, 8) * scale
    else:
        value = decode_float(packed >> (CODE * spec.BITS), 7, 3, 128) * scale
    if spec.OPERAND == "float32":
        return value
    elif spec.OPERAND == "bfloat16":
        if spec.WIDEN:  # the interpreter's cast cuts digits off
            value = round_bfloat16(value)
        return value.to(tl.bfloat16)
    else:
        return value.to(tl.float16)


@triton.jit
def store_part(parts, acc, code, m, columns, WIDTH: tl.constexpr, spec: tl.constexpr):
    """Stores a split's tile of outputs."""
    at = (code * spec.M + m)[:, None] * WIDTH + columns[None, :]
    tl.store(parts + at, acc, mask=(m < spec.M)[:, None] & (columns < WIDTH)[None, :])


@triton.jit
def program_of(program, COLUMN_TILES: tl.constexpr, spec: tl.constexpr):
    """Batch row, split, tile of columns and tile of rows of a program.

    Programs that share words run next to each other, and find them in L2.
    """
    ROW_TILES: tl.constexpr = (spec.M + spec.BLOCK_M - 1) // spec.BLOCK_M
    row = program % ROW_TILES
    column = program // ROW_TILES % COLUMN_TILES
    part = program // (ROW_TILES * COLUMN_TILES) % spec.SPLITS
    return tl.cast(program // (ROW_TILES * COLUMN_TILES * spec.SPLITS), tl.int64), part, column, row


@triton.jit
def over_rows_kernel(x, packed, scales, zeros, table, parts, spec: tl.constexpr, per: tl.constexpr):
    """x [M, R] times the packed matrix: parts [SPLITS, PER, M, W]."""
    COLUMN_TILES: tl.constexpr = (spec.W + spec.BLOCK_W - 1) // spec.BLOCK_W
    TILES: tl.constexpr = (spec.R + spec.BLOCK_R - 1) // spec.BLOCK_R
    SHARE: tl.constexpr = (TILES + spec.SPLITS - 1) // spec.SPLITS
    # SHARE tiles of the contracted axis a split; the last splits may have fewer or none, and store zeros.
    M: tl.constexpr = spec.BLOCK_M
    N: tl.constexpr = spec.BLOCK_W
    batch, part, column, row = program_of(tl.program_id(0), COLUMN_TILES, spec)
    x = at_batch(x, batch, per.X, spec.M * spec.R)
    packed = at_batch(packed, batch, per.PACKED, spec.R * spec.W)
    scales = at_batch(scales, batch, per.SCALES, spec.R * spec.GROUPS)
    if spec.AFFINE and not spec.CENTER:
        zeros = at_batch(zeros, batch, per.ZEROS, spec.R * spec.GROUPS)
    parts += (batch * spec.SPLITS + part) * (spec.PER * spec.M * spec.W)
    m = row * M + tl.arange(0, M)
    words = column * N + tl.arange(0, N)
    # A name for each accumulator, which the loop carries. With words of 4 codes the last four are dropped by the
    # compiler.
    acc0 = tl.zeros([M, N], tl.float32)
    acc1, acc2, acc3, acc4, acc5, acc6, acc7 = acc0, acc0, acc0, acc0, acc0, acc0, acc0
    row_in_tile = tl.arange(0, spec.BLOCK_R)
    # Prologue: the scales of the first tile.
    stored, stored_zeros = load_scales(scales, zeros, part * SHARE * spec.BLOCK_R + row_in_tile, column, spec)
    for tile in tl.range(part * SHARE, tl.minimum(part * SHARE + SHARE, TILES)):
        r = tile * spec.BLOCK_R + row_in_tile
        mask = (r < spec.R)[:, None] & (words < spec.W)[None, :]
        left = tl.load(
            x + m[:, None] * spec.R + r[None, :], mask=(m < spec.M)[:, None] & (r < spec.R)[None, :], other=0.0
        )
        words_tile = tl.load(packed + r[:, None] * spec.W + words[None, :], mask=mask, other=0).to(
            tl.int32, bitcast=True
        )
        scale, offset = factors(stored, stored_zeros, spec)
        # The scales of the next tile arrive while this tile's products run. Loaded in the step that needs them, and
        # one for every word, they made the kernel take 86.8 us instead of 29.4 (docs/lab/quantized_matmul_gpu.md).
        stored, stored_zeros = load_scales(scales, zeros, r + spec.BLOCK_R, column, spec)
        # One tile of x and one of words serve all products of the step.
        acc0 = add_dot(acc0, left, dequantize(words_tile, scale, offset, table, 0, spec), spec)
        acc1 = add_dot(acc1, left, dequantize(words_tile, scale, offset, table, 1, spec), spec)
        acc2 = add_dot(acc2, left, dequantize(words_tile, scale, offset, table, 2, spec), spec)
        acc3 = add_dot(acc3, left, dequantize(words_tile, scale, offset, table, 3, spec), spec)
        if spec.PER == 8:
            acc4 = add_dot(acc4, left, dequantize(words_tile, scale, offset, table, 4, spec), spec)
            acc5 = add_dot(acc5, left, dequantize(words_tile, scale, offset, table, 5, spec), spec)
            acc6 = add_dot(acc6, left, dequantize(words_tile, scale, offset, table, 6, spec), spec)
            acc7 = add_dot(acc7, left, dequantize(words_tile, scale, offset, table, 7, spec), spec)
    store_part(parts, acc0, 0, m, words, spec.W, spec)
    store_part(parts, acc1, 1, m, words, spec.W, spec)
    store_part(parts, acc2, 2, m, words, spec.W, spec)
    store_part(parts, acc3, 3, m, words, spec.W, spec)
    if spec.PER == 8:
        store_part(parts, acc4, 4, m, words, spec.W, spec)
        store_part(parts, acc5, 5, m, words, spec.W, spec)
        store_part(parts, acc6, 6, m, words, spec.W, spec)
        store_part(parts, acc7, 7, m, words, spec.W, spec)


@triton.jit
def over_words_kernel(x, packed, scales, zeros, table, parts, spec: tl.constexpr, per: tl.constexpr):
    """x, code by code [PER, M, W], times the transposed packed matrix: parts [SPLITS, 1, M, R]."""
    COLUMN_TILES: tl.constexpr = (spec.R + spec.BLOCK_R - 1) // spec.BLOCK_R
    TILES: tl.constexpr = (spec.W + spec.BLOCK_W - 1) // spec.BLOCK_W
    SHARE: tl.constexpr = (TILES + spec.SPLITS - 1) // spec.SPLITS
    M: tl.constexpr = spec.BLOCK_M
    N: tl.constexpr = spec.BLOCK_R
    PER: tl.constexpr = spec.PER
    batch, part, column, row = program_of(tl.program_id(0), COLUMN_TILES, spec)
    x = at_batch(x, batch, per.X, spec.PER * spec.M * spec.W)
    packed = at_batch(packed, batch, per.PACKED, spec.R * spec.W)
    scales = at_batch(scales, batch, per.SCALES, spec.R * spec.GROUPS)
    if spec.AFFINE and not spec.CENTER:
        zeros = at_batch(zeros, batch, per.ZEROS, spec.R * spec.GROUPS)
    parts += (batch * spec.SPLITS + part) * (spec.M * spec.R)
    m = row * M + tl.arange(0, M)
    r = column * N + tl.arange(0, N)
    acc = tl.zeros([M, N], tl.float32)
    # Prologue: the scales of the first tile.
    stored, stored_zeros = load_scales(scales, zeros, r, part * SHARE, spec)
    for tile in tl.range(part * SHARE, tl.minimum(part * SHARE + SHARE, TILES)):
        words = tile * spec.BLOCK_W + tl.arange(0, spec.BLOCK_W)
        mask = (r < spec.R)[:, None] & (words < spec.W)[None, :]
        words_tile = tl.load(packed + r[:, None] * spec.W + words[None, :], mask=mask, other=0).to(
            tl.int32, bitcast=True
        )
        scale, offset = factors(stored, stored_zeros, spec)
        # The scales of the next tile, as in the other kernel.
        stored, stored_zeros = load_scales(scales, zeros, r, tile + 1, spec)
        for code in tl.static_range(PER):
            # x comes code by code, so column j of this tile belongs to code `code` of word j.
            at = x + (code * spec.M + m)[:, None] * spec.W + words[None, :]
            left = tl.load(at, mask=(m < spec.M)[:, None] & (words < spec.W)[None, :], other=0.0)
            # The contracted axis is that of words, so the weights are the transposed right operand.
            acc = add_dot(acc, left, tl.trans(dequantize(words_tile, scale, offset, table, code, spec)), spec)
    store_part(parts, acc, 0, m, r, spec.R, spec)
