"""Device helpers of the causal convolution's kernels: tiles of tokens, taps and the activation."""

import triton
import triton.language as tl

from ejkernel_triton.blocks import LOG2E


@triton.jit
def locate_program(program, spec: tl.constexpr):
    """Returns (row of the batch, block of tokens, tile of channels) of a program; the tile is the fastest index."""
    tile = program % spec.NUM_CHANNEL_TILES
    block = (program // spec.NUM_CHANNEL_TILES) % spec.NUM_TOKEN_PROGRAMS
    return tl.cast(program // (spec.NUM_CHANNEL_TILES * spec.NUM_TOKEN_PROGRAMS), tl.int64), block, tile


@triton.jit
def row_load_offsets(tile, spec: tl.constexpr):
    """Returns the offsets of the elements that a program loads per row: channels, or pairs of channels."""
    if spec.LOAD_CHANNEL_PAIRS:
        return tile * (spec.BLOCK_C // 2) + tl.arange(0, spec.BLOCK_C // 2)
    else:
        return tile * spec.BLOCK_C + tl.arange(0, spec.BLOCK_C)


@triton.jit
def load_rows(base, token, end, offsets_in_row, NUM_ROWS: tl.constexpr, spec: tl.constexpr):
    """Loads NUM_ROWS rows of a [T, C] array from `token` on, unconverted; 0 before the first and from `end` on."""
    # Two 16-bit channels are loaded as one 32-bit integer, since a loop carries each element in a register of its own.
    WIDTH: tl.constexpr = spec.C // 2 if spec.LOAD_CHANNEL_PAIRS else spec.C
    if spec.LOAD_CHANNEL_PAIRS:
        base = base.to(tl.pointer_type(tl.int32))
    start = base + tl.cast(token, tl.int64) * WIDTH
    # A tuple of vectors instead of a tile: taps are other rows of the same thread, so no product needs a shuffle or a
    # shift. Bounds are checked on both sides: a halo may begin before token 0 and end after T.
    rows = ()
    for i in tl.static_range(NUM_ROWS):
        at = token + i + 0 * offsets_in_row
        mask = (offsets_in_row < WIDTH) & (at >= 0) & (at < end)
        rows += (tl.load(start + (i * WIDTH + offsets_in_row), mask=mask, other=0),)
    return rows


@triton.jit
def to_float32(row, spec: tl.constexpr):
    """Returns [BLOCK_C] float32 of a row of `load_rows` or of floats."""
    if row.dtype == tl.int32:
        # A bfloat16 is the upper half of the equal float32, so a conversion is one instruction.
        low, high = tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;",
            "=f,=f,r",
            [row],
            dtype=(tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
        return tl.reshape(tl.join(low, high), [spec.BLOCK_C])
    else:
        return row.to(tl.float32)


@triton.jit
def load_x_values(x, initial_tokens, token, channels, offsets_in_row, NUM_ROWS: tl.constexpr, spec: tl.constexpr):
    """Loads rows of x from W - 1 tokens before `token` on, as float32; rows before token 0 are those of the state."""
    STATE_TOKENS: tl.constexpr = spec.W - 1
    rows = load_rows(x, token - STATE_TOKENS, spec.T, offsets_in_row, NUM_ROWS, spec)
    x_values = ()
    for i in tl.static_range(NUM_ROWS):
        row = to_float32(rows[i], spec)
        if spec.HAS_INITIAL_STATE and i < STATE_TOKENS:
            # Only the first block reads the state's tokens; in other blocks the mask is false and nothing is loaded.
            at = token + i + 0 * channels  # index of the state's token, if it is one
            state_tokens = tl.load(
                initial_tokens + (token + i) * spec.C + channels,
                mask=(channels < spec.C) & (at < STATE_TOKENS),
                other=0.0,
            )
            # Added instead of selected: rows of x before token 0 are loaded as 0.
            row += state_tokens.to(tl.float32)
        x_values += (row,)
    return x_values


@triton.jit
def load_weights(weight, channels, spec: tl.constexpr):
    """Loads the W weights of every channel; the first one is for the token itself."""
    W: tl.constexpr = spec.W
    weights = ()
    for k in tl.static_range(W):
        weights += (tl.load(weight + (W - 1 - k) * spec.C + channels, mask=channels < spec.C, other=0.0),)
    return weights


@triton.jit
def load_bias(bias, channels, spec: tl.constexpr):
    """Loads the bias, [BLOCK_C] float32; zeros if there is none."""
    if spec.HAS_BIAS:
        return tl.load(bias + channels, mask=channels < spec.C, other=0.0)
    else:
        return 0.0 * channels.to(tl.float32)


@triton.jit
def load_sequence_start(sequence_starts, token, spec: tl.constexpr):
    """Returns the first token of a token's sequence; T for padding tokens."""
    if spec.IS_PACKED:
        return tl.load(sequence_starts + token, mask=token < spec.T, other=spec.T)
    else:
        return 0


@triton.jit
def mask_tap(row, token, start, k, spec: tl.constexpr):
    """Returns a tap of a token, the row k tokens before it; 0 if that belongs to another sequence."""
    if spec.IS_PACKED:
        return tl.where(token - k >= start, row, 0.0)
    else:
        return row


@triton.jit
def sigmoid(p, spec: tl.constexpr):
    """Returns 1 / (1 + exp(-p)). If exp overflows to inf, the result is 0."""
    if spec.USES_FAST_MATH:
        # The same operations without handling of subnormal numbers: 1 + exp(-p) is never subnormal, and rounds away a
        # subnormal exp(-p). It takes four instructions instead of nine, out of about 30 per element in the backward
        # pass.
        return tl.inline_asm_elementwise(
            "{.reg .f32 e; mul.f32 e, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 e, e; add.f32 e, e, 0f3F800000;"
            " rcp.approx.ftz.f32 $0, e;}",
            "=f,f",
            [p],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        return 1.0 / (1.0 + tl.exp2(-p * LOG2E))
