"""Device helpers of the selective scan.

A tile of states is [BN, BLOCK_E], state elements before channels: Triton spreads the last axis over the lanes of a
warp, so a thread has all elements of its channels' states and sums over them without shuffles.

`spec` is the kernels' `ScanSpec`.
"""

import triton
import triton.language as tl

from ejkernel_triton.blocks import load_token_range


@triton.jit
def locate_program(program, spec: tl.constexpr):
    """Returns (batch row, segment of the sequence, tile of channels) of a program; the tile is the fastest index."""
    tile = program % spec.NUM_CHANNEL_TILES
    segment = (program // spec.NUM_CHANNEL_TILES) % spec.NUM_SEGMENTS
    return tl.cast(program // (spec.NUM_CHANNEL_TILES * spec.NUM_SEGMENTS), tl.int64), segment, tile


@triton.jit
def locate_segment(segment, spec: tl.constexpr):
    """Returns (first token, end, first interval) of a segment of the row."""
    # Segments are whole intervals, so each starts at a stored state.
    first_token = segment * (spec.INTERVALS_PER_SEGMENT * spec.TOKENS_PER_INTERVAL)
    return (
        first_token,
        tl.minimum(first_token + spec.INTERVALS_PER_SEGMENT * spec.TOKENS_PER_INTERVAL, spec.T),
        segment * spec.INTERVALS_PER_SEGMENT,
    )


@triton.jit
def load_sequence_range(cu_seqlens, first_intervals, segment):
    """Returns (first token, end, first interval) of a packed sequence."""
    first_token, end = load_token_range(cu_seqlens, segment)
    return first_token, end, tl.load(first_intervals + segment).to(tl.int64)


@triton.jit
def tile_channels(tile, spec: tl.constexpr):
    """Returns the channels of a tile.

    The opaque zero hides that the tile starts at a multiple of its size. Otherwise Triton gives a thread several
    channels, to vectorise loads, and spreads a state's elements over lanes: sums over elements then need shuffles.
    """
    opaque_zero = tile >> 31
    return tile * spec.BLOCK_E + opaque_zero + tl.arange(0, spec.BLOCK_E)


@triton.jit
def load_tokens(base, token, end, channels, spec: tl.constexpr):
    """Loads BLOCK_T vectors [BLOCK_E] of a [T, E] array from `token` on; 0 before the first and from token `end` on.

    All loads are issued before the first value is used, so a block waits for memory once.
    """
    BLOCK_T: tl.constexpr = spec.BLOCK_T
    start = base + tl.cast(token, tl.int64) * spec.E
    token_rows = ()
    for i in tl.static_range(BLOCK_T):
        # A tuple of vectors instead of a tile: every token is a register that no loop has to index.
        token_rows += (
            tl.load(start + (i * spec.E + channels), mask=in_bounds_mask(token + i, end, channels, spec), other=0.0),
        )
    return token_rows


@triton.jit
def store_tokens(base, token, end, channels, token_rows, REVERSED: tl.constexpr, spec: tl.constexpr):
    """Stores BLOCK_T vectors [BLOCK_E], in reverse order if REVERSED, to a [T, E] array from `token` on, up to
    `end`.
    """
    BLOCK_T: tl.constexpr = spec.BLOCK_T
    start = base + tl.cast(token, tl.int64) * spec.E
    for i in tl.static_range(BLOCK_T):
        at = start + (i * spec.E + channels)
        row = token_rows[BLOCK_T - 1 - i] if REVERSED else token_rows[i]
        tl.store(at, row.to(base.dtype.element_ty), mask=in_bounds_mask(token + i, end, channels, spec))


@triton.jit
def in_bounds_mask(token, end, channels, spec: tl.constexpr):
    # A vector, since the interpreter has no & of a vector and a scalar.
    at = token + 0 * channels
    return (channels < spec.E) & (at >= 0) & (at < end)


@triton.jit
def load_b_or_c(base, token, end, spec: tl.constexpr):
    """Loads [BN] of a [T, N] array at a token, shared by all channels; 0 before the first and from token `end` on."""
    n = tl.arange(0, spec.BN)
    at = base + token * spec.N + n
    # All lanes read the same addresses, 16 bytes per load, which Triton does only without a mask.
    if spec.N == spec.BN and spec.T % spec.BLOCK_T == 0 and not spec.IS_PACKED:
        return tl.load(at)
    else:
        # The next token of a packed row belongs to another sequence: read 0 instead of its value, which may be NaN.
        return tl.load(at, mask=(n < spec.N) & (token + 0 * n < end), other=0.0)


@triton.jit
def load_b_and_c(b_array, c_array, token, end, spec: tl.constexpr):
    """Returns B and C of a token, [BN] each."""
    return load_b_or_c(b_array, token, end, spec), load_b_or_c(c_array, token, end, spec)


@triton.jit
def state_offsets(channels, spec: tl.constexpr):
    """Returns (offsets, mask) of a tile of an [N, E] array."""
    n = tl.arange(0, spec.BN)
    return n[:, None] * spec.E + channels[None, :], (n < spec.N)[:, None] & (channels < spec.E)[None, :]


@triton.jit
def load_state(base, channels, spec: tl.constexpr):
    """Returns [BN, BLOCK_E] of an [N, E] array; 0 outside of it."""
    at, mask = state_offsets(channels, spec)
    return tl.load(base + at, mask=mask, other=0.0)


@triton.jit
def store_state(base, channels, state, spec: tl.constexpr):
    """Stores [BN, BLOCK_E] to an [N, E] array."""
    at, mask = state_offsets(channels, spec)
    tl.store(base + at, state, mask=mask)


@triton.jit
def load_boundary_state(boundary_states, segment, channels, HAS_INITIAL_STATES: tl.constexpr, spec: tl.constexpr):
    """Returns the states at one end of a segment, from [NUM_SEGMENTS, N, E]; zeros without `boundary_states`."""
    if HAS_INITIAL_STATES:
        return load_state(boundary_states + segment * (spec.N * spec.E), channels, spec)
    else:
        return zero_state_tile(spec)


@triton.jit
def zero_state_tile(spec: tl.constexpr):
    """Returns [BN, BLOCK_E] of zeros."""
    ROWS: tl.constexpr = spec.BN
    COLUMNS: tl.constexpr = spec.BLOCK_E
    return tl.zeros([ROWS, COLUMNS], tl.float32)


@triton.jit
def zero_channel_vector(spec: tl.constexpr):
    """Returns [BLOCK_E] of zeros."""
    COLUMNS: tl.constexpr = spec.BLOCK_E
    return tl.zeros([COLUMNS], tl.float32)
