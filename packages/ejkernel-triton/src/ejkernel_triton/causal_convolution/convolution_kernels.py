# pyright: basic, reportIndexIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalMemberAccess=false, reportGeneralTypeIssues=false
"""The short causal convolution: both kernels move every element once and are bound by HBM.

    tokens        t0-3 t0-2 t0-1 | t0 t0+1 ...  block ... | +1 +2 +3
    forward    x  halo           | rows of the block      |               each row is loaded once into registers
    backward   x  halo           | rows of the block      | halo          recomputed sums, for the activation
               dy                | rows of the block      | halo          dx_t needs dy of the W - 1 tokens behind it

A program has one tile of channels and a block of tokens. A thread has a few neighbouring channels, so that its loads
are wide, and all W taps of a token are registers of that thread. Halos come from L1 or L2, since the neighbouring
program reads them too.

For packed sequences, `starts` holds the first token of each token's sequence, and T for tokens of none: a tap counts if
it is not before it. A program of the backward kernel adds up the gradients of the weights over its tokens, and XLA adds
up the programs in a fixed order: no atomic additions, so every run gives the same bits.

Source: the short convolution of H3 (Fu et al. 2022, arXiv:2212.14052) and of Mamba (Gu & Dao 2023, arXiv:2312.00752).
"""

import triton
import triton.language as tl

from ejkernel_triton.blocks import LOG2E


@triton.jit
def program_of(program, spec: tl.constexpr):
    """(row of the batch, block of tokens, tile of channels) of a program; the tile is the fastest index."""
    tile = program % spec.TILES
    block = (program // spec.TILES) % spec.BLOCKS
    return tl.cast(program // (spec.TILES * spec.BLOCKS), tl.int64), block, tile


@triton.jit
def load_rows(base, token, channels, COUNT: tl.constexpr, spec: tl.constexpr):
    """COUNT vectors [BLOCK_C] of a [T, C] array from a token on; 0 outside of it."""
    start = base + tl.cast(token, tl.int64) * spec.C
    # A tuple of vectors and not a tile: taps are other rows of the same thread, so no product needs a shuffle or a
    # shift. Tokens are checked on both sides: a halo may begin before token 0 and end behind T.
    rows = ()
    for i in tl.static_range(COUNT):
        at = token + i + 0 * channels
        mask = (channels < spec.C) & (at >= 0) & (at < spec.T)
        rows += (tl.load(start + (i * spec.C + channels), mask=mask, other=0.0),)
    return rows


@triton.jit
def load_taps(x, before, token, channels, COUNT: tl.constexpr, spec: tl.constexpr):
    """Rows of x from W - 1 tokens before a token on, as float32; rows before the first are those of the state."""
    STATE_TOKENS: tl.constexpr = spec.W - 1
    rows = load_rows(x, token - STATE_TOKENS, channels, COUNT, spec)
    taps = ()
    for i in tl.static_range(COUNT):
        row = rows[i].to(tl.float32)
        if spec.STATE and i < STATE_TOKENS:
            # The state's tokens precede the first block alone; elsewhere the mask is false and nothing is loaded.
            at = token + i + 0 * channels  # the slot of the state, where it is one
            state_tokens = tl.load(
                before + (token + i) * spec.C + channels, mask=(channels < spec.C) & (at < STATE_TOKENS), other=0.0
            )
            # Added, not selected: rows of x before token 0 are loaded as 0.
            row += state_tokens.to(tl.float32)
        taps += (row,)
    return taps


@triton.jit
def load_weights(weight, channels, spec: tl.constexpr):
    """The W weights of every channel, the weight of the token itself first."""
    W: tl.constexpr = spec.W
    weights = ()
    for k in tl.static_range(W):
        weights += (tl.load(weight + (W - 1 - k) * spec.C + channels, mask=channels < spec.C, other=0.0),)
    return weights


@triton.jit
def load_bias(bias, channels, spec: tl.constexpr):
    """[BLOCK_C] float32, zeros without one."""
    if spec.BIAS:
        return tl.load(bias + channels, mask=channels < spec.C, other=0.0)
    else:
        return 0.0 * channels.to(tl.float32)


@triton.jit
def start_of(starts, token, spec: tl.constexpr):
    """The first token of a token's sequence; T for tokens of none."""
    if spec.PACKED:
        return tl.load(starts + token, mask=token < spec.T, other=spec.T)
    else:
        return 0


@triton.jit
def masked_tap(row, token, start, k, spec: tl.constexpr):
    """A tap of a token, the row k tokens before it; 0 if that is of another sequence."""
    if spec.PACKED:
        return tl.where(token - k >= start, row, 0.0)
    else:
        return row


@triton.jit
def sigmoid(p):
    """1 / (1 + exp(-p)); exp2(inf) is inf and not an error, and 1 / inf is 0."""
    return 1.0 / (1.0 + tl.exp2(-p * LOG2E))


@triton.jit
def forward_kernel(x, weight, bias, before, starts, output, spec: tl.constexpr, per: tl.constexpr):
    """Activated sums of a block of tokens."""
    BLOCK_T: tl.constexpr = spec.BLOCK_T
    W: tl.constexpr = spec.W
    row, block, tile = program_of(tl.program_id(0), spec)
    channels = tile * spec.BLOCK_C + tl.arange(0, spec.BLOCK_C)
    x = x + (row // per.X) * (spec.T * spec.C)
    output = output + row * (spec.T * spec.C)
    if spec.STATE:
        before = before + (row // per.BEFORE) * ((W - 1) * spec.C)
    if spec.PACKED:
        starts = starts + (row // per.STARTS) * spec.T
    # W weights and the bias a channel stay in registers for all tokens of the program.
    weights = load_weights(weight + (row // per.WEIGHT) * (W * spec.C), channels, spec)
    if spec.BIAS:
        bias = bias + (row // per.BIAS) * spec.C
    shift = load_bias(bias, channels, spec)
    token = block * BLOCK_T
    taps = load_taps(x, before, token, channels, BLOCK_T + W - 1, spec)
    outputs = ()
    for i in tl.static_range(BLOCK_T):
        start = start_of(starts, token + i, spec)
        p = shift
        for k in tl.static_range(W):
            p += weights[k] * masked_tap(taps[i + W - 1 - k], token + i, start, k, spec)
        if spec.SILU:
            p = p * sigmoid(p)
        # Tokens of no sequence have start T and an output of 0.
        if spec.PACKED:
            p = tl.where(token + i >= start, p, 0.0)
        outputs += (p,)
    # Stored behind the arithmetic of the whole block: loads and stores do not alternate.
    at = output + tl.cast(token, tl.int64) * spec.C
    for i in tl.static_range(BLOCK_T):
        mask = (channels < spec.C) & (token + i + 0 * channels < spec.T)
        tl.store(at + (i * spec.C + channels), outputs[i].to(output.dtype.element_ty), mask=mask)


@triton.jit
def sum_cotangents(taps, weights, shift, starts, cotangents, token, spec: tl.constexpr):
    """Cotangents of the sums of the block's tokens and the W - 1 behind it; 0 for tokens of no sequence."""
    W: tl.constexpr = spec.W
    COUNT: tl.constexpr = spec.BLOCK_T + spec.W - 1
    dsums = ()
    for i in tl.static_range(COUNT):
        d = cotangents[i].to(tl.float32)
        start = start_of(starts, token + i, spec)
        # Sums are made again instead of kept: the kernel is bound by memory, and x is read anyway.
        if spec.SILU:
            p = shift
            for k in tl.static_range(W):
                p += weights[k] * masked_tap(taps[i + W - 1 - k], token + i, start, k, spec)
            s = sigmoid(p)
            # The derivative of p sigmoid(p).
            d *= s * (1.0 + p * (1.0 - s))
        if spec.PACKED:
            d = tl.where(token + i >= start, d, 0.0)
        dsums += (d,)
    return dsums


@triton.jit
def backward_kernel(
    x,
    weight,
    bias,
    before,
    starts,
    cotangent,
    dx,
    dweight,
    dbias,
    dbefore,
    spec: tl.constexpr,
    per: tl.constexpr,
):
    """Gradients of STEPS blocks of tokens.

    `dweight` [B, BLOCKS, W, C] and `dbias` [B, BLOCKS, C] are those of a program's tokens, `dbefore` [B, W - 1, C] that
    of the state.
    """
    BLOCK_T: tl.constexpr = spec.BLOCK_T
    W: tl.constexpr = spec.W
    row, block, tile = program_of(tl.program_id(0), spec)
    channels = tile * spec.BLOCK_C + tl.arange(0, spec.BLOCK_C)
    mask = channels < spec.C
    x, dx = x + (row // per.X) * (spec.T * spec.C), dx + row * (spec.T * spec.C)
    cotangent = cotangent + (row // per.COTANGENT) * (spec.T * spec.C)
    if spec.STATE:
        before = before + (row // per.BEFORE) * ((W - 1) * spec.C)
    if spec.PACKED:
        starts = starts + (row // per.STARTS) * spec.T
    weights = load_weights(weight + (row // per.WEIGHT) * (W * spec.C), channels, spec)
    if spec.BIAS:
        bias = bias + (row // per.BIAS) * spec.C
    shift = load_bias(bias, channels, spec)
    partial_row = row * spec.BLOCKS + block
    dweight = dweight + partial_row * (W * spec.C) + channels
    dbias_acc = tl.zeros_like(shift)
    dweights = weight_zeros(shift, spec)
    for step in tl.range(0, spec.STEPS):
        token = (block * spec.STEPS + step) * BLOCK_T
        # Halos on both sides: W - 1 rows before, for the sums, and W - 1 behind, whose sums read this block.
        taps = load_taps(x, before, token, channels, BLOCK_T + 2 * (W - 1), spec)
        dys = load_rows(cotangent, token, channels, BLOCK_T + W - 1, spec)
        dsums = sum_cotangents(taps, weights, shift, starts, dys, token, spec)
        dweights = add_weights(dweights, dsums, taps, starts, token, spec)
        for i in tl.static_range(BLOCK_T):
            dbias_acc += dsums[i]
        store_gradients(dx, weights, dsums, starts, token, channels, spec)
        # The state's tokens precede the first block, so one program a row writes their gradients. Token j of the state
        # is tap k of token j + k - (W - 1).
        if spec.STATE and token == 0:
            for j in tl.static_range(W - 1):
                d = tl.zeros_like(shift)
                for k in tl.static_range(W - 1 - j, W):
                    d += weights[k] * dsums[j + k - (W - 1)]
                tl.store(dbefore + (row * (W - 1) + j) * spec.C + channels, d, mask=mask)
    for k in tl.static_range(W):
        # Parts of a program's tokens, which XLA adds up. The weights are stored in the order of the record's.
        tl.store(dweight + (W - 1 - k) * spec.C, dweights[k], mask=mask)
    tl.store(dbias + partial_row * spec.C + channels, dbias_acc, mask=mask)


@triton.jit
def store_gradients(dx, weights, dsums, starts, token, channels, spec: tl.constexpr):
    """Stores the gradients of a block of x, from the sums of each token and of the W - 1 behind it."""
    BLOCK_T: tl.constexpr = spec.BLOCK_T
    W: tl.constexpr = spec.W
    at = dx + tl.cast(token, tl.int64) * spec.C
    for i in tl.static_range(BLOCK_T):
        d = weights[0] * dsums[i]
        for k in tl.static_range(1, W):
            # `masked_tap` is 0 where the later token's sequence starts between the two tokens.
            d += weights[k] * masked_tap(dsums[i + k], token + i + k, start_of(starts, token + i + k, spec), k, spec)
        mask = (channels < spec.C) & (token + i + 0 * channels < spec.T)
        tl.store(at + (i * spec.C + channels), d.to(dx.dtype.element_ty), mask=mask)


@triton.jit
def weight_zeros(shift, spec: tl.constexpr):
    """A tile of zeros for each weight."""
    W: tl.constexpr = spec.W
    dweights = ()
    for _ in tl.static_range(W):
        dweights += (tl.zeros_like(shift),)
    return dweights


@triton.jit
def add_weights(dweights, dsums, taps, starts, token, spec: tl.constexpr):
    """The gradients of the weights with those of a block."""
    BLOCK_T: tl.constexpr = spec.BLOCK_T
    W: tl.constexpr = spec.W
    added = ()
    for k in tl.static_range(W):
        d = dweights[k]
        # This block's tokens alone: those of the halo are the next block's.
        for i in tl.static_range(BLOCK_T):
            d += dsums[i] * masked_tap(taps[i + W - 1 - k], token + i, start_of(starts, token + i, spec), k, spec)
        added += (d,)
    return added
