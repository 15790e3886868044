"""The backward pass of the short causal convolution; see `causal_conv_fwd`."""

import triton
import triton.language as tl

from ejkernel_triton.causal_convolution.kernels.tile import (
    load_bias,
    load_rows,
    load_taps,
    load_weights,
    masked_tap,
    program_tile,
    sigmoid,
    start_of,
    tile_offsets,
    widened,
)


@triton.jit
def sum_cotangents(taps, weights, shift, starts, cotangents, token, COUNT: tl.constexpr, spec: tl.constexpr):
    """Returns the cotangents of the pre-activation sums of COUNT tokens; 0 for padding tokens. `taps` are the x of
    the COUNT tokens and of the W - 1 tokens before them.
    """
    W: tl.constexpr = spec.W
    dsums = ()
    for i in tl.static_range(COUNT):
        d = widened(cotangents[i], spec)
        start = start_of(starts, token + i, spec)
        # Sums are recomputed instead of stored: the kernel is memory-bound, and reads x anyway.
        if spec.SILU:
            p = shift
            for k in tl.static_range(W):
                p += weights[k] * masked_tap(taps[i + W - 1 - k], token + i, start, k, spec)
            s = sigmoid(p, spec)
            # The derivative of p sigmoid(p).
            d *= s * (1.0 + p * (1.0 - s))
        if spec.PACKED:
            d = tl.where(token + i >= start, d, 0.0)
        dsums += (d,)
    return dsums


@triton.jit
def continued(carried, rows, COUNT: tl.constexpr, spec: tl.constexpr):
    """Returns the W - 1 carried rows and the next COUNT rows, as float32."""
    W: tl.constexpr = spec.W
    both = ()
    for i in tl.static_range(W - 1):
        both += (carried[i],)
    for i in tl.static_range(COUNT):
        both += (widened(rows[i], spec),)
    return both


@triton.jit
def last_rows(rows, COUNT: tl.constexpr, spec: tl.constexpr):
    """Returns the last W - 1 of W - 1 + COUNT rows."""
    W: tl.constexpr = spec.W
    kept = ()
    for i in tl.static_range(W - 1):
        kept += (rows[COUNT + i],)
    return kept


@triton.jit
def causal_conv_bwd_kernel(
    x,
    weight,
    bias,
    before,
    starts,
    cotangent,
    dfinal,
    dx,
    dweight,
    dbefore,
    spec: tl.constexpr,
    per: tl.constexpr,
):
    """Computes the gradients of STEPS blocks of tokens, from the first to the last.

    `dweight` [B, BLOCKS, W + 1, C] are the sums over a program's tokens, with the bias's gradient last; `dbefore` [B, W
    - 1, C] are the state's gradients, and `dfinal` [B, W - 1, C] is the final state's cotangent.
    """
    BLOCK_T: tl.constexpr = spec.BLOCK_T
    STEPS: tl.constexpr = spec.STEPS
    W: tl.constexpr = spec.W
    row, block, tile = program_tile(tl.program_id(0), spec)
    channels = tile * spec.BLOCK_C + tl.arange(0, spec.BLOCK_C)
    places = tile_offsets(tile, spec)
    x, dx = x + (row // per.X) * (spec.T * spec.C), dx + row * (spec.T * spec.C)
    cotangent = cotangent + (row // per.COTANGENT) * (spec.T * spec.C)
    dbefore = dbefore + row * ((W - 1) * spec.C)
    if spec.STATE:
        before = before + (row // per.BEFORE) * ((W - 1) * spec.C)
    if spec.PACKED:
        starts = starts + (row // per.STARTS) * spec.T
    weights = load_weights(weight + (row // per.WEIGHT) * (W * spec.C), channels, spec)
    if spec.BIAS:
        bias = bias + (row // per.BIAS) * spec.C
    shift = load_bias(bias, channels, spec)
    first = block * (STEPS * BLOCK_T)
    # The gradients of a program's tokens also depend on the sums of the W - 1 tokens after them.
    end = tl.minimum(first + (STEPS * BLOCK_T + W - 1), spec.T)
    dbias, dweights = tl.zeros_like(shift), zeros(shift, W)
    taps = load_taps(x, before, first, channels, places, W - 1, spec)
    # Sums before the first token belong to another program, or do not exist: nothing is stored for them.
    dsums = zeros(shift, W - 1)
    # The next blocks are copied to shared memory, where they take no registers, so that several are in flight.
    for step in tl.range(0, STEPS, num_stages=spec.STAGES):
        token = first + step * BLOCK_T
        rows = load_rows(x, token, end, places, BLOCK_T, spec)
        dys = load_rows(cotangent, token, end, places, BLOCK_T, spec)
        taps = continued(taps, rows, BLOCK_T, spec)
        made = sum_cotangents(taps, weights, shift, starts, dys, token, BLOCK_T, spec)
        dweights = add_weights(dweights, made, taps, starts, token, spec)
        for i in tl.static_range(BLOCK_T):
            dbias += made[i]
        dsums = continued(dsums, made, BLOCK_T, spec)
        store_gradients(dx, dbefore, weights, dsums, starts, token - (W - 1), first, channels, BLOCK_T, spec)
        taps, dsums = last_rows(taps, BLOCK_T, spec), last_rows(dsums, BLOCK_T, spec)
    token = first + STEPS * BLOCK_T
    rows = load_rows(x, token, end, places, W - 1, spec)
    dys = load_rows(cotangent, token, end, places, W - 1, spec)
    taps = continued(taps, rows, W - 1, spec)
    dsums = continued(dsums, sum_cotangents(taps, weights, shift, starts, dys, token, W - 1, spec), W - 1, spec)
    store_gradients(dx, dbefore, weights, dsums, starts, token - (W - 1), first, channels, W - 1, spec)
    if spec.FINAL and token > spec.T - (W - 1):
        add_final(dx, dfinal + (row // per.DFINAL) * ((W - 1) * spec.C), first, token, channels, spec)
    dweight = dweight + (row * spec.BLOCKS + block) * ((W + 1) * spec.C) + channels
    for k in tl.static_range(W):
        # Partial sums of a program's tokens, which XLA adds up. The weights are stored in the record's order.
        tl.store(dweight + (W - 1 - k) * spec.C, dweights[k], mask=channels < spec.C)
    tl.store(dweight + W * spec.C, dbias, mask=channels < spec.C)


@triton.jit
def store_gradients(
    dx, dbefore, weights, dsums, starts, token, first, channels, COUNT: tl.constexpr, spec: tl.constexpr
):
    """Stores the gradients of COUNT tokens of x, from the sums of each and of the W - 1 after it.

    Tokens before a program's first one belong to the program before it; those before token 0 are the state.
    """
    W: tl.constexpr = spec.W
    at = dx + tl.cast(token, tl.int64) * spec.C
    for i in tl.static_range(COUNT):
        d = weights[0] * dsums[i]
        for k in tl.static_range(1, W):
            # `masked_tap` is 0 where the later token's sequence starts between the two tokens.
            d += weights[k] * masked_tap(dsums[i + k], token + i + k, start_of(starts, token + i + k, spec), k, spec)
        number = token + i + 0 * channels
        mask = (channels < spec.C) & (number >= first) & (number < spec.T)
        tl.store(at + (i * spec.C + channels), d.to(dx.dtype.element_ty), mask=mask)
        if spec.STATE:
            # Only the first program of a row has tokens before 0: token -1 is the state's last.
            place = (token + i + (W - 1)) * spec.C + channels
            tl.store(dbefore + place, d, mask=(channels < spec.C) & (number < 0))


@triton.jit
def add_final(dx, dfinal, first, end, channels, spec: tl.constexpr):
    """Adds the final state's cotangent to the gradients of those of the last W - 1 tokens that the program has."""
    W: tl.constexpr = spec.W
    # The program reads back what it wrote, perhaps in another thread. This happens once per batch row; otherwise all
    # programs would carry another sum.
    tl.debug_barrier()
    for j in tl.static_range(W - 1):
        number = spec.T - (W - 1) + j + 0 * channels
        mask = (channels < spec.C) & (number >= first) & (number < end)
        at = dx + tl.cast(spec.T - (W - 1) + j, tl.int64) * spec.C + channels
        d = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        d += tl.load(dfinal + j * spec.C + channels, mask=mask, other=0.0).to(tl.float32)
        tl.store(at, d.to(dx.dtype.element_ty), mask=mask)


@triton.jit
def zeros(like, COUNT: tl.constexpr):
    """Returns COUNT vectors of zeros."""
    made = ()
    for _ in tl.static_range(COUNT):
        made += (tl.zeros_like(like),)
    return made


@triton.jit
def add_weights(dweights, dsums, taps, starts, token, spec: tl.constexpr):
    """Adds the gradients of the weights of a block."""
    BLOCK_T: tl.constexpr = spec.BLOCK_T
    W: tl.constexpr = spec.W
    added = ()
    for k in tl.static_range(W):
        d = dweights[k]
        for i in tl.static_range(BLOCK_T):
            d += dsums[i] * masked_tap(taps[i + W - 1 - k], token + i, start_of(starts, token + i, spec), k, spec)
        added += (d,)
    return added
