"""The backward pass of the short causal convolution; see `causal_conv_fwd`."""

import triton
import triton.language as tl

from ejkernel_triton.causal_convolution.kernels.tile import (
    load_bias,
    load_rows,
    load_sequence_start,
    load_weights,
    load_x_values,
    locate_program,
    mask_tap,
    row_load_offsets,
    sigmoid,
    to_float32,
)


@triton.jit
def recompute_preactivation_gradients(
    x_values, weights, bias_values, sequence_starts, cotangents, token, NUM_ROWS: tl.constexpr, spec: tl.constexpr
):
    """Returns the cotangents of the pre-activation sums of NUM_ROWS tokens; 0 for padding tokens. `x_values` are the x
    of the NUM_ROWS tokens and of the W - 1 tokens before them.
    """
    W: tl.constexpr = spec.W
    preactivation_gradients = ()
    for i in tl.static_range(NUM_ROWS):
        d = to_float32(cotangents[i], spec)
        start = load_sequence_start(sequence_starts, token + i, spec)
        # Sums are recomputed instead of stored: the kernel is memory-bound, and reads x anyway.
        if spec.APPLY_SILU:
            p = bias_values
            for k in tl.static_range(W):
                p += weights[k] * mask_tap(x_values[i + W - 1 - k], token + i, start, k, spec)
            s = sigmoid(p, spec)
            # The derivative of p sigmoid(p).
            d *= s * (1.0 + p * (1.0 - s))
        if spec.IS_PACKED:
            d = tl.where(token + i >= start, d, 0.0)
        preactivation_gradients += (d,)
    return preactivation_gradients


@triton.jit
def append_rows(previous_rows, rows, NUM_ROWS: tl.constexpr, spec: tl.constexpr):
    """Returns the W - 1 carried rows and the next NUM_ROWS rows, as float32."""
    W: tl.constexpr = spec.W
    all_rows = ()
    for i in tl.static_range(W - 1):
        all_rows += (previous_rows[i],)
    for i in tl.static_range(NUM_ROWS):
        all_rows += (to_float32(rows[i], spec),)
    return all_rows


@triton.jit
def keep_last_rows(rows, NUM_ROWS: tl.constexpr, spec: tl.constexpr):
    """Returns the last W - 1 of W - 1 + NUM_ROWS rows."""
    W: tl.constexpr = spec.W
    last_values = ()
    for i in tl.static_range(W - 1):
        last_values += (rows[NUM_ROWS + i],)
    return last_values


@triton.jit
def causal_conv_bwd_kernel(
    x,
    weight,
    bias,
    initial_tokens,
    sequence_starts,
    cotangent,
    final_cotangent,
    dx,
    dweight,
    dinitial_tokens,
    spec: tl.constexpr,
    per: tl.constexpr,
):
    """Computes the gradients of BLOCKS_PER_PROGRAM blocks of tokens, from the first to the last.

    `dweight` [B, NUM_TOKEN_PROGRAMS, W + 1, C] are the sums over a program's tokens, with the bias's gradient last;
    `dinitial_tokens` [B, W
    - 1, C] are the state's gradients, and `final_cotangent` [B, W - 1, C] is the final state's cotangent.
    """
    BLOCK_T: tl.constexpr = spec.BLOCK_T
    BLOCKS_PER_PROGRAM: tl.constexpr = spec.BLOCKS_PER_PROGRAM
    W: tl.constexpr = spec.W
    row, block, tile = locate_program(tl.program_id(0), spec)
    channels = tile * spec.BLOCK_C + tl.arange(0, spec.BLOCK_C)
    offsets_in_row = row_load_offsets(tile, spec)
    x, dx = x + (row // per.X) * (spec.T * spec.C), dx + row * (spec.T * spec.C)
    cotangent = cotangent + (row // per.COTANGENT) * (spec.T * spec.C)
    dinitial_tokens = dinitial_tokens + row * ((W - 1) * spec.C)
    if spec.HAS_INITIAL_STATE:
        initial_tokens = initial_tokens + (row // per.INITIAL_TOKENS) * ((W - 1) * spec.C)
    if spec.IS_PACKED:
        sequence_starts = sequence_starts + (row // per.SEQUENCE_STARTS) * spec.T
    weights = load_weights(weight + (row // per.WEIGHT) * (W * spec.C), channels, spec)
    if spec.HAS_BIAS:
        bias = bias + (row // per.BIAS) * spec.C
    bias_values = load_bias(bias, channels, spec)
    first_token = block * (BLOCKS_PER_PROGRAM * BLOCK_T)
    # The gradients of a program's tokens also depend on the sums of the W - 1 tokens after them.
    end = tl.minimum(first_token + (BLOCKS_PER_PROGRAM * BLOCK_T + W - 1), spec.T)
    dbias, weight_gradients = tl.zeros_like(bias_values), make_zero_rows(bias_values, W)
    x_values = load_x_values(x, initial_tokens, first_token, channels, offsets_in_row, W - 1, spec)
    # Sums before the first token belong to another program, or do not exist: nothing is stored for them.
    preactivation_gradients = make_zero_rows(bias_values, W - 1)
    # The next blocks are copied to shared memory, where they take no registers, so that several are in flight.
    for step in tl.range(0, BLOCKS_PER_PROGRAM, num_stages=spec.NUM_STAGES):
        token = first_token + step * BLOCK_T
        rows = load_rows(x, token, end, offsets_in_row, BLOCK_T, spec)
        dys = load_rows(cotangent, token, end, offsets_in_row, BLOCK_T, spec)
        x_values = append_rows(x_values, rows, BLOCK_T, spec)
        new_preactivation_gradients = recompute_preactivation_gradients(
            x_values, weights, bias_values, sequence_starts, dys, token, BLOCK_T, spec
        )
        weight_gradients = add_weight_gradients(
            weight_gradients, new_preactivation_gradients, x_values, sequence_starts, token, spec
        )
        for i in tl.static_range(BLOCK_T):
            dbias += new_preactivation_gradients[i]
        preactivation_gradients = append_rows(preactivation_gradients, new_preactivation_gradients, BLOCK_T, spec)
        store_x_gradients(
            dx,
            dinitial_tokens,
            weights,
            preactivation_gradients,
            sequence_starts,
            token - (W - 1),
            first_token,
            channels,
            BLOCK_T,
            spec,
        )
        x_values, preactivation_gradients = (
            keep_last_rows(x_values, BLOCK_T, spec),
            keep_last_rows(preactivation_gradients, BLOCK_T, spec),
        )
    token = first_token + BLOCKS_PER_PROGRAM * BLOCK_T
    rows = load_rows(x, token, end, offsets_in_row, W - 1, spec)
    dys = load_rows(cotangent, token, end, offsets_in_row, W - 1, spec)
    x_values = append_rows(x_values, rows, W - 1, spec)
    preactivation_gradients = append_rows(
        preactivation_gradients,
        recompute_preactivation_gradients(x_values, weights, bias_values, sequence_starts, dys, token, W - 1, spec),
        W - 1,
        spec,
    )
    store_x_gradients(
        dx,
        dinitial_tokens,
        weights,
        preactivation_gradients,
        sequence_starts,
        token - (W - 1),
        first_token,
        channels,
        W - 1,
        spec,
    )
    if spec.ADD_FINAL_COTANGENT and token > spec.T - (W - 1):
        add_final_cotangent(
            dx, final_cotangent + (row // per.FINAL_COTANGENT) * ((W - 1) * spec.C), first_token, token, channels, spec
        )
    dweight = dweight + (row * spec.NUM_TOKEN_PROGRAMS + block) * ((W + 1) * spec.C) + channels
    for k in tl.static_range(W):
        # Partial sums of a program's tokens, which XLA adds up. The weights are stored in the record's order.
        tl.store(dweight + (W - 1 - k) * spec.C, weight_gradients[k], mask=channels < spec.C)
    tl.store(dweight + W * spec.C, dbias, mask=channels < spec.C)


@triton.jit
def store_x_gradients(
    dx,
    dinitial_tokens,
    weights,
    preactivation_gradients,
    sequence_starts,
    token,
    first_token,
    channels,
    NUM_ROWS: tl.constexpr,
    spec: tl.constexpr,
):
    """Stores the gradients of NUM_ROWS tokens of x, from the sums of each and of the W - 1 after it.

    Tokens before a program's first one belong to the program before it; those before token 0 are the state.
    """
    W: tl.constexpr = spec.W
    at = dx + tl.cast(token, tl.int64) * spec.C
    for i in tl.static_range(NUM_ROWS):
        d = weights[0] * preactivation_gradients[i]
        for k in tl.static_range(1, W):
            # `mask_tap` is 0 where the later token's sequence starts between the two tokens.
            d += weights[k] * mask_tap(
                preactivation_gradients[i + k],
                token + i + k,
                load_sequence_start(sequence_starts, token + i + k, spec),
                k,
                spec,
            )
        token_index = token + i + 0 * channels
        mask = (channels < spec.C) & (token_index >= first_token) & (token_index < spec.T)
        tl.store(at + (i * spec.C + channels), d.to(dx.dtype.element_ty), mask=mask)
        if spec.HAS_INITIAL_STATE:
            # Only the first program of a row has tokens before 0: token -1 is the state's last.
            state_offset = (token + i + (W - 1)) * spec.C + channels
            tl.store(dinitial_tokens + state_offset, d, mask=(channels < spec.C) & (token_index < 0))


@triton.jit
def add_final_cotangent(dx, final_cotangent, first_token, end, channels, spec: tl.constexpr):
    """Adds the final state's cotangent to the gradients of those of the last W - 1 tokens that the program has."""
    W: tl.constexpr = spec.W
    # The program reads back what it wrote, perhaps in another thread. This happens once per batch row; otherwise all
    # programs would carry another sum.
    tl.debug_barrier()
    for j in tl.static_range(W - 1):
        token_index = spec.T - (W - 1) + j + 0 * channels
        mask = (channels < spec.C) & (token_index >= first_token) & (token_index < end)
        at = dx + tl.cast(spec.T - (W - 1) + j, tl.int64) * spec.C + channels
        d = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        d += tl.load(final_cotangent + j * spec.C + channels, mask=mask, other=0.0).to(tl.float32)
        tl.store(at, d.to(dx.dtype.element_ty), mask=mask)


@triton.jit
def make_zero_rows(template, NUM_ROWS: tl.constexpr):
    """Returns NUM_ROWS vectors of zeros."""
    new_preactivation_gradients = ()
    for _ in tl.static_range(NUM_ROWS):
        new_preactivation_gradients += (tl.zeros_like(template),)
    return new_preactivation_gradients


@triton.jit
def add_weight_gradients(
    weight_gradients, preactivation_gradients, x_values, sequence_starts, token, spec: tl.constexpr
):
    """Adds the gradients of the weights of a block."""
    BLOCK_T: tl.constexpr = spec.BLOCK_T
    W: tl.constexpr = spec.W
    new_dweights = ()
    for k in tl.static_range(W):
        d = weight_gradients[k]
        for i in tl.static_range(BLOCK_T):
            d += preactivation_gradients[i] * mask_tap(
                x_values[i + W - 1 - k], token + i, load_sequence_start(sequence_starts, token + i, spec), k, spec
            )
        new_dweights += (d,)
    return new_dweights
