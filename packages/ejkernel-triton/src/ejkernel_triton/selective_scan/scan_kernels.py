# pyright: basic, reportIndexIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalMemberAccess=false, reportGeneralTypeIssues=false
"""The forward walk of a selective scan, and what parts of the sequence do to states where they are walked at once.

    tokens    |--- interval ---|--- interval ---|--- interval ---| ...
    states    s0               s1               s2                       written: what the backward pass begins with
    tiles      [BLOCK_E]  x, dt  ->  h in registers  ->  y               read and written once

A program owns BLOCK_E channels of one row of the batch and walks along the tokens of its part. A thread holds the
states of its channels; B and C are the same for all of them. The exponential of every number of every state is what the
kernel spends its time on: the special function units make 16 of them a clock and multiprocessor.

With one part there is one pass. Where channels are too few for the chip, `ends_kernel` first walks all parts but the
last from zero, one exponential a number and no output; what a part makes of the states before it is a product with
exp(A * sum of dt). XLA passes the states on from part to part, and `scan_kernel` walks all parts at once.

Source: Gu & Dao 2023, arXiv:2312.00752.
"""

import triton
import triton.language as tl

from ejkernel_triton.selective_scan.tile import (
    channels_of,
    load_column,
    load_columns,
    load_state,
    load_tokens,
    program_of,
    starting_state,
    store_state,
    store_tokens,
    zero_channels,
    zero_state,
)


@triton.jit
def scan_kernel(
    x,
    step,
    decay,
    write,
    read,
    skip,
    starts,
    output,
    states,
    final,
    GIVEN: tl.constexpr,
    spec: tl.constexpr,
    per: tl.constexpr,
):
    """Output, states before every interval and final states; `decay` is A^T * log2(e), [N, E].

    `starts` [B, SPLITS, N, E] are the states before every part, if GIVEN.
    """
    BLOCK_T: tl.constexpr = spec.BLOCK_T
    row, part, tile = program_of(tl.program_id(0), spec)
    channels = channels_of(tile, spec)
    x, step = x + (row // per.X) * (spec.T * spec.E), step + (row // per.STEP) * (spec.T * spec.E)
    output = output + row * (spec.T * spec.E)
    write, read = write + (row // per.WRITE) * (spec.T * spec.N), read + (row // per.READ) * (spec.T * spec.N)
    states = states + row * (spec.CHUNKS * spec.N * spec.E)
    rates = load_state(decay + (row // per.DECAY) * (spec.N * spec.E), channels, spec)
    through = tl.load(skip + (row // per.SKIP) * spec.E + channels, mask=channels < spec.E, other=0.0)
    if GIVEN:
        starts = starts + (row // per.STARTS) * (spec.SPLITS * spec.N * spec.E)
    state = starting_state(starts, part, channels, GIVEN, spec)
    begin = part * (spec.PART * spec.INTERVAL)
    end = tl.minimum(begin + spec.PART * spec.INTERVAL, spec.T)
    xs, steps = load_tokens(x, begin, channels, spec), load_tokens(step, begin, channels, spec)
    for token in tl.range(begin, end, BLOCK_T):
        if token % spec.INTERVAL == 0:
            store_state(states + tl.cast(token // spec.INTERVAL, tl.int64) * (spec.N * spec.E), channels, state, spec)
        # The next block's tokens are on their way while this one's are worked on: carried from turn to turn, because
        # the compiler moves a load down to where its value is used. Barriers stop it for columns only in part.
        next_xs, next_steps = (
            load_tokens(x, token + BLOCK_T, channels, spec),
            load_tokens(step, token + BLOCK_T, channels, spec),
        )
        columns = (load_columns(write, read, token, spec), load_columns(write, read, token + 1, spec))
        tl.debug_barrier()
        made = ()
        for i in tl.static_range(BLOCK_T):
            if i + 2 < BLOCK_T:
                columns += (load_columns(write, read, token + i + 2, spec),)
                tl.debug_barrier()
            b, c = columns[i]
            now, dt = xs[i].to(tl.float32), steps[i].to(tl.float32)
            state = tl.exp2(rates * dt[None, :]) * state + b[:, None] * (dt * now)[None, :]
            made += (tl.sum(state * c[:, None], 0) + through * now,)
        store_tokens(output, token, channels, made, False, spec)
        xs, steps = next_xs, next_steps
    if part == spec.SPLITS - 1:
        store_state(final + row * (spec.N * spec.E), channels, state, spec)


@triton.jit
def column_at(column, token, i: tl.constexpr, REVERSE: tl.constexpr, spec: tl.constexpr):
    """The column of the token that is walked over as the ith of a block."""
    if REVERSE:
        return load_column(column, token + (spec.BLOCK_T - 1 - i), spec)
    else:
        return load_column(column, token + i, spec)


@triton.jit
def ends_kernel(
    step,
    decay,
    column,
    values,
    ends,
    sums,
    REVERSE: tl.constexpr,
    spec: tl.constexpr,
    per: tl.constexpr,
):
    """What every part makes of zero, [B, SPLITS, N, E], and its sum of dt, [B, SPLITS, E].

    Forward, `column` is B and what is added to states is dt x B, with `values` x. In REVERSE it is C,
    what is added to the cotangents of the states is dy C, before they decay, and `values` is dy.
    """
    BLOCK_T: tl.constexpr = spec.BLOCK_T
    row, part, tile = program_of(tl.program_id(0), spec)
    channels = channels_of(tile, spec)
    values, step = values + (row // per.VALUES) * (spec.T * spec.E), step + (row // per.STEP) * (spec.T * spec.E)
    column = column + (row // per.COLUMN) * (spec.T * spec.N)
    rates = load_state(decay + (row // per.DECAY) * (spec.N * spec.E), channels, spec)
    state = zero_state(spec)
    total = zero_channels(spec)
    begin = part * (spec.PART * spec.INTERVAL)
    blocks = tl.cdiv(tl.minimum(spec.PART * spec.INTERVAL, spec.T - begin), BLOCK_T)
    toward = -BLOCK_T if REVERSE else BLOCK_T
    token = begin + (blocks - 1) * BLOCK_T if REVERSE else begin
    added, steps = load_tokens(values, token, channels, spec), load_tokens(step, token, channels, spec)
    for _ in tl.range(0, blocks):
        ahead = token + toward
        next_added, next_steps = load_tokens(values, ahead, channels, spec), load_tokens(step, ahead, channels, spec)
        columns = (column_at(column, token, 0, REVERSE, spec), column_at(column, token, 1, REVERSE, spec))
        tl.debug_barrier()
        for i in tl.static_range(BLOCK_T):
            if i + 2 < BLOCK_T:
                columns += (column_at(column, token, i + 2, REVERSE, spec),)
                tl.debug_barrier()
            if REVERSE:
                dt, value = steps[BLOCK_T - 1 - i].to(tl.float32), added[BLOCK_T - 1 - i].to(tl.float32)
                state = tl.exp2(rates * dt[None, :]) * (state + columns[i][:, None] * value[None, :])
            else:
                dt, value = steps[i].to(tl.float32), added[i].to(tl.float32)
                state = tl.exp2(rates * dt[None, :]) * state + columns[i][:, None] * (dt * value)[None, :]
            total += dt
        added, steps, token = next_added, next_steps, ahead
    at = row * spec.SPLITS + part
    store_state(ends + at * (spec.N * spec.E), channels, state, spec)
    tl.store(sums + at * spec.E + channels, total, mask=channels < spec.E)
