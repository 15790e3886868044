"""Computes states and outputs in one scan: a program computes the outputs of each chunk, then adds it to its state.

    tokens     |  chunk 0  |  chunk 1  | ...
    state      S0          S1          S2 ...             [K, BLOCK_V] float32 in registers, never in memory
    outputs    q S0, pairs q S1, pairs ...

What `chunk_fwd_h_kernel` and `chunk_fwd_o_kernel` pass through memory is a large part of their traffic: 0.54 of 1.34 GB
with B4 S8192 H16 and K, V of 128 in bfloat16. In return the chunks of a scan are sequential, so this needs about as
many scans as there are multiprocessors.

With the delta rule, `value` is U and a token writes U - W S (see `wy_fast`), so each chunk has one more product in the
chain from state to state. With gates per key channel queries, keys and W have their decay already, and scores are
precomputed (see `wy_channel_gates`); without the delta rule such gates use the two kernels.
"""

import triton
import triton.language as tl

from ejkernel_triton.blocks import add_dot, dot
from ejkernel_triton.linear_recurrence.kernels.tile import (
    causal,
    chunk_base,
    constant_gate,
    decay_until_end,
    gates_base,
    head_gates,
    last_head_gate,
    load_chunk_decay,
    load_dt,
    load_rows,
    load_state,
    nth_sequence,
    pair_weights,
    scan_span,
    scores_at,
    store_rows,
    store_state,
)


@triton.jit
def store_padding_zeros(
    output, bounds, row, head, v_start, BLOCK_V: tl.constexpr, spec: tl.constexpr, per: tl.constexpr
):
    """Writes zeros to the outputs of padding tokens before and after a packed row's sequences."""
    bounds += (row // per.BOUNDS) * (spec.SEQUENCES + 2)
    C: tl.constexpr = spec.CHUNK
    zeros = tl.zeros([C, BLOCK_V], tl.float32)
    end = tl.load(bounds)
    for start in tl.range(0, end, C):
        at = chunk_base(output, row, start, head, spec.T, spec.H, spec.V)
        store_rows(at, zeros, start, end, v_start, spec.H, spec.V, spec)
    end = end * 0 + spec.T
    for start in tl.range(tl.load(bounds + spec.SEQUENCES), end, C):
        at = chunk_base(output, row, start, head, spec.T, spec.H, spec.V)
        store_rows(at, zeros, start, end, v_start, spec.H, spec.V, spec)


@triton.jit
def fused_chunk_scan_kernel(
    query,
    key,
    value,
    gates,
    dt,
    skip,
    initial,
    w,
    scores,
    bounds,
    first_chunks,
    order,
    output,
    final,
    spec: tl.constexpr,
    per: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    INITIAL: tl.constexpr,
    HAS_W: tl.constexpr,
):
    """Computes outputs and final state of one head and sequence, BLOCK_V value channels; see
    `forward.fused_chunk_scan`.
    """
    V_TILES: tl.constexpr = (spec.V + BLOCK_V - 1) // BLOCK_V
    C: tl.constexpr = spec.CHUNK
    program = tl.program_id(0)
    # Tiles of values are the fastest index: programs that run together read the same queries and keys from L2.
    v_start = (program % V_TILES) * BLOCK_V
    program = program // V_TILES
    head = program % spec.H
    program = program // spec.H
    # The first programs of a packed row write zeros for padding tokens: a separate kernel would only cost its launch, a
    # hundredth of the call.
    PACKED: tl.constexpr = spec.PER_SEQUENCE == 0
    row = program // (spec.SEQUENCES + PACKED)
    n = program % (spec.SEQUENCES + PACKED) - PACKED
    sequence = nth_sequence(order, row, tl.maximum(n, 0), spec, per)
    first, last, sequence_start, end = scan_span(bounds, first_chunks, row, sequence, spec, per)
    if PACKED:
        last = tl.where(n < 0, first, last)
    acc = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if INITIAL:
        from_row = tl.cast(row // per.INITIAL, tl.int64) * spec.SEQUENCES + sequence
        at = initial + (from_row * spec.H + head) * (spec.K * spec.V)
        acc = load_state(at, 0, v_start, BLOCK_K, BLOCK_V, spec).to(tl.float32)
    q_head, k_head = head // (spec.H // spec.HQ), head // (spec.H // spec.HK)
    v_head = head // (spec.H // VALUE_HEADS)
    factor = 0.0
    if spec.SKIP:
        factor = tl.load(skip + (row // per.SKIP) * spec.H + head).to(tl.float32)
    constant = constant_gate(gates, row, head, spec, per)
    next_decay = load_chunk_decay(gates, row, head, first, 0, BLOCK_K, spec, per)
    for step in tl.range(0, last - first):
        chunk = first + step
        start = sequence_start + step * C
        chunk_decay = next_decay
        # Prefetched by one chunk: see `chunk_fwd_h_kernel`.
        next_decay = load_chunk_decay(gates, row, head, chunk + 1, 0, BLOCK_K, spec, per)
        # No address depends on `acc`, so the pipeliner copies the next chunks' tiles during this chunk's products.
        q_base = chunk_base(query, row // per.QUERY, start, q_head, spec.T, spec.HQ, spec.K)
        k_base = chunk_base(key, row // per.KEY, start, k_head, spec.T, spec.HK, spec.K)
        v_base = chunk_base(value, row // per.VALUE, start, v_head, spec.T, VALUE_HEADS, spec.V)
        q = load_rows(q_base, start, end, 0, spec.HQ, spec.K, BLOCK_K, spec)
        k = load_rows(k_base, start, end, 0, spec.HK, spec.K, BLOCK_K, spec)
        v = load_rows(v_base, start, end, v_start, VALUE_HEADS, spec.V, BLOCK_V, spec)
        # The state is read, and updated with the chunk, before the chunk's scores are computed: doing both at the same
        # time takes too many registers.
        state = acc.to(q.dtype)
        out = dot(q, state, spec)
        if HAS_W:
            w_base = chunk_base(w, row // per.W, start, head, spec.T, spec.H, spec.K)
            w_tile = load_rows(w_base, start, end, 0, spec.H, spec.K, BLOCK_K, spec)
            # The chunk's writes, U - W S: rounded once, so that state, outputs and gradients use the same values.
            v = (-add_dot(-v.to(tl.float32), w_tile, state, spec)).to(v.dtype)
        read, writes = v, v
        if spec.WIDTH == 1:
            g_base = gates_base(gates, row, head, chunk, spec, per)
            g = head_gates(g_base, constant, 0, C, spec)
            total = last_head_gate(g_base, constant, end - start, spec)
            # The decay from each token to the chunk's end is applied to values, of which a program has fewer than keys.
            weights = decay_until_end(total, g, spec)
        if spec.DT:
            factors = load_dt(dt, row // per.DT, start, end, head, spec)
            weights = weights * factors if spec.WIDTH == 1 else factors
            read = (v.to(tl.float32) * factors[:, None]).to(v.dtype)
        if spec.WIDTH == 1 or spec.DT:
            writes = (v.to(tl.float32) * weights[:, None]).to(v.dtype)
        if spec.WIDTH == 1:
            out *= tl.exp2(g)[:, None]
            acc *= tl.exp2(total)
        if spec.DECAYED:
            acc *= tl.exp2(chunk_decay)[:, None]
        # Tokens past the end have keys and values of 0, so they add nothing; their outputs are not stored.
        acc = add_dot(acc, tl.trans(k), writes, spec)
        if spec.WIDTH > 1:
            # The scores are stored masked and in the operands' dtype, so no thread has to convert them.
            out = add_dot(out, tl.load(scores_at(scores, row, head, chunk, spec)), read, spec)
        else:
            pairs = dot(q, tl.trans(k), spec)
            if spec.WIDTH == 1:
                # Also masks: the weights are 0 above the diagonal. Gates are reloaded; `step >> 30` is a 0 that the
                # compiler cannot fold. Kept through the products above they would spill.
                pairs *= pair_weights(head_gates(g_base + (step >> 30), constant, 0, C, spec))
            else:
                pairs = tl.where(causal(spec), pairs, 0.0)
            out = add_dot(out, pairs.to(v.dtype), read, spec)
        # The output is scaled; the skip is not.
        out *= spec.SCALE
        if spec.SKIP:
            out += v.to(tl.float32) * factor
        target = chunk_base(output, row, start, head, spec.T, spec.H, spec.V)
        store_rows(target, out, start, end, v_start, spec.H, spec.V, spec)
    state_offset = ((tl.cast(row, tl.int64) * spec.SEQUENCES + sequence) * spec.H + head) * (spec.K * spec.V)
    if PACKED:
        if n < 0:
            store_padding_zeros(output, bounds, row, head, v_start, BLOCK_V, spec, per)
        else:
            store_state(final + state_offset, acc, 0, v_start, spec)
    else:
        store_state(final + state_offset, acc, 0, v_start, spec)
