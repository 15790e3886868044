"""Computes the states between chunks, from cumulative log-decay inside of chunks (`chunk_local_cumsum`).

    decay      |g0 g1 g2 g3|g4 g5 g6 g7| ...               log2 sums inside of each chunk
    tokens     |  chunk 0  |  chunk 1  | ...
    states     S0          S1          S2 ...              a program scans along a row's chunks with a tile of the state
               |___________|___________|____ final state   in its registers

A program keeps a tile [BLOCK_K, BLOCK_V] of one head's state in registers. Elements of a state are independent, so
programs pass all tiles in parallel. Copies of the next chunks' keys and values are in flight while the tensor cores
multiply this chunk's (`state_stages` pipeline stages).

The backward pass scans in reverse, with queries instead of keys and the output's cotangent instead of values.
"""

import triton
import triton.language as tl

from ejkernel_triton.blocks import dot
from ejkernel_triton.linear_recurrence.kernels.tile import (
    chunk_base,
    constant_gate,
    decay_until_end,
    gates_base,
    head_gates,
    last_head_gate,
    load_chunk_decay,
    load_columns,
    load_dt,
    load_rows,
    load_state,
    nth_sequence,
    scan_span,
    state_base,
    store_rows,
    store_state,
)
from ejkernel_triton.linear_recurrence.segments.kernels.effective_length import (
    gates_effective_length,
    load_effective_length,
)


@triton.jit
def decayed(acc, left, gates, total, factors, REVERSE: tl.constexpr, spec: tl.constexpr):
    """Returns the decayed state, and the tokens' keys (or, in reverse, queries) with the decay from or to them.

    Args:
        acc: [BLOCK_K, BLOCK_V] state.
        left: [BLOCK_K, CHUNK] keys, or queries.
        gates: Cumulative gates, [CHUNK] or [BLOCK_K, CHUNK].
        total: The last cumulative gate, a scalar or [BLOCK_K].
        factors: [CHUNK] dt.
    """
    if spec.WIDTH > 0:
        if REVERSE:
            # Decay from the chunk's first token to each query.
            weights = tl.exp2(gates)
        else:
            # Decay from each token to the chunk's end. Sums decrease from token to token, so no exponent is positive.
            weights = decay_until_end(total if spec.WIDTH == 1 else total[:, None], gates, spec)
        if spec.WIDTH == 1:
            if spec.DT and not REVERSE:
                weights = weights * factors
            weights = weights[None, :]
            acc *= tl.exp2(total)
        else:
            if spec.DT and not REVERSE:
                weights = weights * factors[None, :]
            acc *= tl.exp2(total)[:, None]
        # Applied to keys instead of values, since these gates differ by key channel.
        left = (left.to(tl.float32) * weights).to(left.dtype)
    else:
        if spec.DT and not REVERSE:
            left = (left.to(tl.float32) * factors[None, :]).to(left.dtype)
    return acc, left


@triton.jit
def chunk_fwd_h_kernel(
    left,
    right,
    gates,
    dt,
    initial,
    w,
    bounds,
    first_chunks,
    order,
    lengths,
    states,
    final,
    v_new,
    spec: tl.constexpr,
    per: tl.constexpr,
    LEFT_HEADS: tl.constexpr,
    RIGHT_HEADS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    REVERSE: tl.constexpr,
    INITIAL: tl.constexpr,
    WRITE: tl.constexpr,
    HAS_W: tl.constexpr,
    TRANSITIONS: tl.constexpr,
    OFFSET: tl.constexpr,
    ZERO_START: tl.constexpr,
    ENDS: tl.constexpr,
    SUB_SEGMENTS: tl.constexpr,
    LENGTH_TILES: tl.constexpr,
):
    """Passes a tile of one head's state along the chunks of a sequence or segment; see `forward.pass_states`."""
    COLUMNS: tl.constexpr = spec.V + spec.K if TRANSITIONS else spec.V
    K_TILES: tl.constexpr = (spec.K + BLOCK_K - 1) // BLOCK_K
    V_TILES: tl.constexpr = (COLUMNS + BLOCK_V - 1) // BLOCK_V
    C: tl.constexpr = spec.CHUNK
    program = tl.program_id(0)
    # Tiles of values are the fastest index: programs that run together read the same keys from L2.
    v_start = (program % V_TILES) * BLOCK_V
    program = program // V_TILES
    k_start = (program % K_TILES) * BLOCK_K
    program = program // K_TILES
    head = program % spec.H
    program = program // spec.H
    row = program // spec.SEQUENCES
    sequence = nth_sequence(order, row, program % spec.SEQUENCES, spec, per)
    first, last, sequence_start, end = scan_span(bounds, first_chunks, row, sequence + OFFSET, spec, per)
    state_offset = ((tl.cast(row, tl.int64) * spec.SEQUENCES + sequence) * spec.H + head) * (spec.K * COLUMNS)
    acc = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if INITIAL:
        from_row = tl.cast(row // per.INITIAL, tl.int64) * spec.SEQUENCES + sequence
        at = initial + (from_row * spec.H + head) * (spec.K * spec.V)
        acc = load_state(at, k_start, v_start, BLOCK_K, BLOCK_V, spec).to(tl.float32)
    if TRANSITIONS:
        # The transition of the first segment of a row that starts with zeros is not needed, nor are the final states of
        # the last segments: these programs have no chunks.
        idle = (sequence == 0) & (v_start >= spec.V) & ZERO_START
        idle |= (sequence >= ENDS) & (v_start + BLOCK_V <= spec.V)
        if LENGTH_TILES > 0:
            # If the state before the segment decays to nothing inside it, nothing passes through, and only the chunks
            # after that determine its final state.
            SEGMENTS: tl.constexpr = (spec.CHUNKS + spec.PER_SEQUENCE - 1) // spec.PER_SEQUENCE
            far = last - load_effective_length(lengths, row, sequence, head, SEGMENTS, LENGTH_TILES, spec)
            used = first >= far
            if ZERO_START:
                used &= sequence > 0
            of_transition = v_start + BLOCK_V > spec.V
            begin = tl.where(v_start < spec.V, tl.minimum(last, tl.maximum(first, far)), last)
            begin = tl.where(of_transition & used, first, begin)
            sequence_start += (begin - first) * C
            first = begin
            if v_start == (spec.V // BLOCK_V) * BLOCK_V:
                tl.store(v_new + ((row * spec.SEQUENCES + sequence) * spec.H + head), used.to(tl.int32))
        last = tl.where(idle, first, last)
        # The columns of the identity follow those of the values.
        of_identity = v_start - spec.V + tl.arange(0, BLOCK_V)
        acc += (k_start + tl.arange(0, BLOCK_K)[:, None] == of_identity[None, :]).to(tl.float32)
    left_head = head // (spec.H // LEFT_HEADS)
    right_head = head // (spec.H // RIGHT_HEADS)
    constant = constant_gate(gates, row, head, spec, per)
    if SUB_SEGMENTS > 0 and spec.WIDTH > 0 and not HAS_W:
        # Sub-segments of a segment, whose final states are combined with the decay of those after them: one that decays
        # to nothing before the segment's end, in reverse before its start, is skipped.
        segment_first = (sequence + OFFSET) // SUB_SEGMENTS * (SUB_SEGMENTS * spec.PER_SEQUENCE)
        segment_last = tl.minimum(segment_first + SUB_SEGMENTS * spec.PER_SEQUENCE, spec.CHUNKS)
        useful = gates_effective_length(
            gates, constant, row, head, k_start, segment_first, segment_last, BLOCK_K, REVERSE, spec, per
        )
        if REVERSE:
            last = tl.maximum(first, tl.minimum(last, segment_first + useful))
        else:
            begin = tl.minimum(last, tl.maximum(first, segment_last - useful))
            sequence_start += (begin - first) * C
            first = begin
    next_decay = load_chunk_decay(gates, row, head, first, k_start, BLOCK_K, spec, per)
    for step in tl.range(0, last - first):
        chunk = last - 1 - step if REVERSE else first + step
        start = sequence_start + (chunk - first) * C
        # Prefetched during the previous chunk: the pipeliner copies operands of products only, and these are not
        # operands. Waiting for them in every chunk took a tenth of the scan (docs/lab/linear_recurrence_gpu.md).
        chunk_decay = next_decay
        next_decay = load_chunk_decay(gates, row, head, chunk + 1, k_start, BLOCK_K, spec, per)
        # Before the chunk's tokens are added: forwards what `chunk_fwd_o_kernel` reads, in reverse the gradient of the
        # state after the chunk.
        if WRITE:
            store_state(state_base(states, row, head, chunk, spec), acc, k_start, v_start, spec)
        left_base = chunk_base(left, row // per.LEFT, start, left_head, spec.T, LEFT_HEADS, spec.K)
        # No address depends on `acc`, so the pipeliner copies the next chunks' tiles during this chunk's product. Three
        # stages suffice: a fourth gains nothing (docs/lab/linear_recurrence_gpu.md).
        left_tile = load_columns(left_base, start, end, k_start, LEFT_HEADS, spec.K, BLOCK_K, spec)
        right_base = chunk_base(right, row // per.RIGHT, start, right_head, spec.T, RIGHT_HEADS, spec.V)
        if TRANSITIONS:
            # Nothing is written to the identity's columns.
            columns = v_start + tl.arange(0, BLOCK_V)
            valid = (start + tl.arange(0, C) < end)[:, None] & (columns < spec.V)[None, :]
            at = right_base + (tl.arange(0, C)[:, None] * (RIGHT_HEADS * spec.V) + columns[None, :])
            right_tile = tl.load(at, mask=valid, other=0.0)
        else:
            right_tile = load_rows(right_base, start, end, v_start, RIGHT_HEADS, spec.V, BLOCK_V, spec)
        if HAS_W:
            # The product sums over key channels, so BLOCK_K spans all of them (see `forward.pass_states`).
            w_base = chunk_base(w, row // per.W, start, head, spec.T, spec.H, spec.K)
            w_tile = load_rows(w_base, start, end, k_start, spec.H, spec.K, BLOCK_K, spec)
            # U - W S. The stored values are rounded like the operands below, so that outputs and gradients use the same
            # writes as the state.
            right_tile = (right_tile.to(tl.float32) - dot(w_tile, acc.to(w_tile.dtype), spec)).to(right_tile.dtype)
            if WRITE:
                target = chunk_base(v_new, row, start, head, spec.T, spec.H, spec.V)
                store_rows(target, right_tile, start, end, v_start, spec.H, spec.V, spec)
        factors = 0.0
        if spec.DT and not REVERSE:
            factors = load_dt(dt, row // per.DT, start, end, head, spec)
        total = 0.0
        g = 0.0
        if spec.WIDTH > 0 and not spec.DECAYED:
            g_base = gates_base(gates, row, head, chunk, spec, per)
            rows = tl.arange(0, C)
            if spec.WIDTH == 1:
                g = head_gates(g_base, constant, 0, C, spec)
                total = last_head_gate(g_base, constant, end - start, spec)
            else:
                columns = k_start + tl.arange(0, BLOCK_K)
                valid = columns < spec.K
                g = tl.load(g_base + (rows[None, :] * spec.K + columns[:, None]), mask=valid[:, None], other=0.0)
                total = tl.load(g_base + (C - 1) * spec.K + columns, mask=valid, other=0.0)
        # The decay multiplies `acc` before the product adds to it: this chunk's writes have their decay already.
        if spec.DECAYED:
            acc *= tl.exp2(chunk_decay)[:, None]
        elif HAS_W and spec.WIDTH == 1:
            # Applied to the writes instead of the keys: they are in registers, and have half as many elements.
            acc *= tl.exp2(total)
            right_tile = (right_tile.to(tl.float32) * tl.exp2(total - g)[:, None]).to(right_tile.dtype)
        else:
            acc, left_tile = decayed(acc, left_tile, g, total, factors, REVERSE, spec)
        if REVERSE:
            # Scaled in float32 after the product, so that 16-bit queries keep their digits.
            acc += dot(left_tile, right_tile, spec) * spec.SCALE
        else:
            acc += dot(left_tile, right_tile, spec)
    if TRANSITIONS:
        k_rows, columns = k_start + tl.arange(0, BLOCK_K), v_start + tl.arange(0, BLOCK_V)
        stored = COLUMNS
        if LENGTH_TILES > 0:
            stored = tl.where(used, COLUMNS, spec.V)  # unused transitions are not read
        inside = (k_rows < spec.K)[:, None] & (columns < stored)[None, :]
        tl.store(final + state_offset + (k_rows[:, None] * COLUMNS + columns[None, :]), acc, mask=inside)
    elif SUB_SEGMENTS > 0 and spec.CONSTANT:
        if last > first:  # `decayed_initial_states_kernel` does not read the others
            store_state(final + state_offset, acc, k_start, v_start, spec)
    else:
        store_state(final + state_offset, acc, k_start, v_start, spec)
