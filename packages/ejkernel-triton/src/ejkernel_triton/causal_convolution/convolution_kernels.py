# pyright: basic, reportIndexIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalMemberAccess=false, reportGeneralTypeIssues=false
"""The short causal convolution: both kernels move every element once and are bound by HBM.

    tokens        t0-3 t0-2 t0-1 | t0 t0+1 ...  block ... | +1 +2 +3
    forward    x  halo           | rows of the block      |               each row is loaded once into registers
    backward   x  carried        | rows of the block      |               recomputed sums, for the activation
               dy                | rows of the block      |
               ds carried        | made from the two      |               gradients of the sums
               dx written        | but the last W - 1     |               dx_t needs ds of the W - 1 tokens behind it

A program has one tile of channels and a block of tokens, in the backward pass several blocks in a row. A thread has a
few neighbouring channels, so that its loads are wide, and all W taps of a token are registers of that thread. Halos of
the forward pass come from L1 or L2, since the neighbouring program reads them too. A program of the backward pass walks
from block to block: it carries the last W - 1 rows of x and of ds, so that nothing is read or made twice, and the rows
of the next blocks are on their way while it works. Only behind its last block it makes W - 1 rows of ds that are
another program's too.

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
def places_of(tile, spec: tl.constexpr):
    """Where the elements of a program's rows lie that are loaded as one: channels, or pairs of them."""
    if spec.PAIRS:
        return tile * (spec.BLOCK_C // 2) + tl.arange(0, spec.BLOCK_C // 2)
    else:
        return tile * spec.BLOCK_C + tl.arange(0, spec.BLOCK_C)


@triton.jit
def load_rows(base, token, end, places, COUNT: tl.constexpr, spec: tl.constexpr):
    """COUNT rows of a [T, C] array from a token on, as they are; 0 before the first and from `end` on."""
    # Two channels of 16 bits as one number of 32: what a loop carries has a register of its own, however short it is.
    WIDTH: tl.constexpr = spec.C // 2 if spec.PAIRS else spec.C
    if spec.PAIRS:
        base = base.to(tl.pointer_type(tl.int32))
    start = base + tl.cast(token, tl.int64) * WIDTH
    # A tuple of vectors and not a tile: taps are other rows of the same thread, so no product needs a shuffle or a
    # shift. Tokens are checked on both sides: a halo may begin before token 0 and end behind T.
    rows = ()
    for i in tl.static_range(COUNT):
        at = token + i + 0 * places
        mask = (places < WIDTH) & (at >= 0) & (at < end)
        rows += (tl.load(start + (i * WIDTH + places), mask=mask, other=0),)
    return rows


@triton.jit
def widened(row, spec: tl.constexpr):
    """[BLOCK_C] float32 of a row, as `load_rows` has it or of floats."""
    if row.dtype == tl.int32:
        # A bfloat16 is the upper half of a float32: one instruction an element.
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
def load_taps(x, before, token, channels, places, COUNT: tl.constexpr, spec: tl.constexpr):
    """Rows of x from W - 1 tokens before a token on, as float32; rows before the first are those of the state."""
    STATE_TOKENS: tl.constexpr = spec.W - 1
    rows = load_rows(x, token - STATE_TOKENS, spec.T, places, COUNT, spec)
    taps = ()
    for i in tl.static_range(COUNT):
        row = widened(rows[i], spec)
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
def sigmoid(p, spec: tl.constexpr):
    """1 / (1 + exp(-p)); exp2(inf) is inf and not an error, and 1 / inf is 0."""
    if spec.FAST:
        # The same instructions without what mends denormal numbers around them: 1 + exp(-p) drops those of exp(-p), and
        # is none. Four instructions instead of nine, of the some 30 an element that the backward pass takes.
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
    taps = load_taps(x, before, token, channels, places_of(tile, spec), BLOCK_T + W - 1, spec)
    outputs = ()
    for i in tl.static_range(BLOCK_T):
        start = start_of(starts, token + i, spec)
        p = shift
        for k in tl.static_range(W):
            p += weights[k] * masked_tap(taps[i + W - 1 - k], token + i, start, k, spec)
        if spec.SILU:
            p = p * sigmoid(p, spec)
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
def sum_cotangents(taps, weights, shift, starts, cotangents, token, COUNT: tl.constexpr, spec: tl.constexpr):
    """Cotangents of the sums of COUNT tokens, of which and of the W - 1 before them are the taps; 0 for those of no
    sequence."""
    W: tl.constexpr = spec.W
    dsums = ()
    for i in tl.static_range(COUNT):
        d = widened(cotangents[i], spec)
        start = start_of(starts, token + i, spec)
        # Sums are made again instead of kept: the kernel is bound by memory, and x is read anyway.
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
    """The W - 1 carried rows and COUNT further ones, as float32."""
    W: tl.constexpr = spec.W
    both = ()
    for i in tl.static_range(W - 1):
        both += (carried[i],)
    for i in tl.static_range(COUNT):
        both += (widened(rows[i], spec),)
    return both


@triton.jit
def last_rows(rows, COUNT: tl.constexpr, spec: tl.constexpr):
    """The last W - 1 of W - 1 + COUNT rows."""
    W: tl.constexpr = spec.W
    kept = ()
    for i in tl.static_range(W - 1):
        kept += (rows[COUNT + i],)
    return kept


@triton.jit
def backward_kernel(
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
    """Gradients of STEPS blocks of tokens, from the first to the last.

    `dweight` [B, BLOCKS, W + 1, C] are those of a program's tokens, that of the bias last, and `dbefore` [B, W - 1, C]
    those of the state. `dfinal` [B, W - 1, C] is the final state's cotangent.
    """
    BLOCK_T: tl.constexpr = spec.BLOCK_T
    STEPS: tl.constexpr = spec.STEPS
    W: tl.constexpr = spec.W
    row, block, tile = program_of(tl.program_id(0), spec)
    channels = tile * spec.BLOCK_C + tl.arange(0, spec.BLOCK_C)
    places = places_of(tile, spec)
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
    # Behind its own tokens a program needs the W - 1 whose sums read them.
    end = tl.minimum(first + (STEPS * BLOCK_T + W - 1), spec.T)
    dbias, dweights = tl.zeros_like(shift), zeros(shift, W)
    taps = load_taps(x, before, first, channels, places, W - 1, spec)
    # Sums before the first token are another program's, or none: nothing of theirs is written.
    dsums = zeros(shift, W - 1)
    # Blocks that are to come are copied into shared memory, where they take no registers: several are on their way.
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
        # Parts of a program's tokens, which XLA adds up. The weights are stored in the order of the record's.
        tl.store(dweight + (W - 1 - k) * spec.C, dweights[k], mask=channels < spec.C)
    tl.store(dweight + W * spec.C, dbias, mask=channels < spec.C)


@triton.jit
def store_gradients(
    dx, dbefore, weights, dsums, starts, token, first, channels, COUNT: tl.constexpr, spec: tl.constexpr
):
    """Stores the gradients of COUNT tokens of x, from the sums of each and of the W - 1 behind it.

    Tokens before a program's first are the program's before; those before token 0 are the state's.
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
            # The first program of a row alone has tokens before 0: token -1 is the state's last.
            place = (token + i + (W - 1)) * spec.C + channels
            tl.store(dbefore + place, d, mask=(channels < spec.C) & (number < 0))


@triton.jit
def add_final(dx, dfinal, first, end, channels, spec: tl.constexpr):
    """Adds the final state's cotangent to the gradients of the last W - 1 tokens, as far as they are the program's."""
    W: tl.constexpr = spec.W
    # Read back by the program that wrote them, but maybe by another of its threads. Once a row of the batch, where all
    # programs would carry a sum.
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
    """COUNT vectors of zeros."""
    made = ()
    for _ in tl.static_range(COUNT):
        made += (tl.zeros_like(like),)
    return made


@triton.jit
def add_weights(dweights, dsums, taps, starts, token, spec: tl.constexpr):
    """The gradients of the weights with those of a block."""
    BLOCK_T: tl.constexpr = spec.BLOCK_T
    W: tl.constexpr = spec.W
    added = ()
    for k in tl.static_range(W):
        d = dweights[k]
        for i in tl.static_range(BLOCK_T):
            d += dsums[i] * masked_tap(taps[i + W - 1 - k], token + i, start_of(starts, token + i, spec), k, spec)
        added += (d,)
    return added
