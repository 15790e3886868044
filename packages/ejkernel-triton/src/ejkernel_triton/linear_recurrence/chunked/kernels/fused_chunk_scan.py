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
    causal_mask,
    chunk_address,
    decay_to_chunk_end,
    gates_address,
    load_constant_gate,
    load_head_gate_cumsum,
    load_head_gate_sum,
    load_log2_chunk_decay,
    load_sequence_bounds,
    load_state,
    load_token_rows,
    load_token_scalars,
    pairwise_decay,
    score_pointers,
    sequence_index_of_scan,
    store_state,
    store_token_rows,
)


@triton.jit
def store_padding_zeros(
    output, padded_cu_seqlens, row, head, v_start, BLOCK_V: tl.constexpr, spec: tl.constexpr, per: tl.constexpr
):
    """Writes zeros to the outputs of padding tokens before and after a packed row's sequences."""
    padded_cu_seqlens += (row // per.PADDED_CU_SEQLENS) * (spec.NUM_SEQUENCES + 2)
    CHUNK: tl.constexpr = spec.CHUNK_SIZE
    zeros = tl.zeros([CHUNK, BLOCK_V], tl.float32)
    sequence_end = tl.load(padded_cu_seqlens)
    for chunk_first_token in tl.range(0, sequence_end, CHUNK):
        at = chunk_address(output, row, chunk_first_token, head, spec.T, spec.H, spec.V)
        store_token_rows(at, zeros, chunk_first_token, sequence_end, v_start, spec.H, spec.V, spec)
    sequence_end = sequence_end * 0 + spec.T
    for chunk_first_token in tl.range(tl.load(padded_cu_seqlens + spec.NUM_SEQUENCES), sequence_end, CHUNK):
        at = chunk_address(output, row, chunk_first_token, head, spec.T, spec.H, spec.V)
        store_token_rows(at, zeros, chunk_first_token, sequence_end, v_start, spec.H, spec.V, spec)


@triton.jit
def fused_chunk_scan_kernel(
    query,
    key,
    value,
    gates,
    dt,
    skip,
    initial_states,
    w,
    scores,
    padded_cu_seqlens,
    chunk_offsets,
    sequences_by_length,
    output,
    final_states,
    spec: tl.constexpr,
    per: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HAS_INITIAL_STATES: tl.constexpr,
    HAS_W: tl.constexpr,
):
    """Computes outputs and final state of one head and sequence, BLOCK_V value channels; see
    `forward.fused_chunk_scan`.
    """
    NUM_V_TILES: tl.constexpr = (spec.V + BLOCK_V - 1) // BLOCK_V
    CHUNK: tl.constexpr = spec.CHUNK_SIZE
    program = tl.program_id(0)
    # Tiles of values are the fastest index: programs that run together read the same queries and keys from L2.
    v_start = (program % NUM_V_TILES) * BLOCK_V
    program = program // NUM_V_TILES
    head = program % spec.H
    program = program // spec.H
    # The first programs of a packed row write zeros for padding tokens: a separate kernel would only cost its launch, a
    # hundredth of the call.
    PACKED: tl.constexpr = spec.CHUNKS_PER_SEGMENT == 0
    row = program // (spec.NUM_SEQUENCES + PACKED)
    scan_index = program % (spec.NUM_SEQUENCES + PACKED) - PACKED
    sequence = sequence_index_of_scan(sequences_by_length, row, tl.maximum(scan_index, 0), spec, per)
    first_chunk, end_chunk, sequence_start, sequence_end = load_sequence_bounds(
        padded_cu_seqlens, chunk_offsets, row, sequence, spec, per
    )
    if PACKED:
        end_chunk = tl.where(scan_index < 0, first_chunk, end_chunk)
    acc = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if HAS_INITIAL_STATES:
        state_row = tl.cast(row // per.INITIAL_STATES, tl.int64) * spec.NUM_SEQUENCES + sequence
        at = initial_states + (state_row * spec.H + head) * (spec.K * spec.V)
        acc = load_state(at, 0, v_start, BLOCK_K, BLOCK_V, spec).to(tl.float32)
    q_head, k_head = head // (spec.H // spec.HQ), head // (spec.H // spec.HK)
    v_head = head // (spec.H // VALUE_HEADS)
    skip_weight = 0.0
    if spec.HAS_SKIP:
        skip_weight = tl.load(skip + (row // per.SKIP) * spec.H + head).to(tl.float32)
    constant_log2_gate = load_constant_gate(gates, row, head, spec, per)
    next_log2_chunk_decay = load_log2_chunk_decay(gates, row, head, first_chunk, 0, BLOCK_K, spec, per)
    for step in tl.range(0, end_chunk - first_chunk):
        chunk = first_chunk + step
        chunk_first_token = sequence_start + step * CHUNK
        log2_chunk_decay = next_log2_chunk_decay
        # Prefetched by one chunk: see `chunk_fwd_h_kernel`.
        next_log2_chunk_decay = load_log2_chunk_decay(gates, row, head, chunk + 1, 0, BLOCK_K, spec, per)
        # No address depends on `acc`, so the pipeliner copies the next chunks' tiles during this chunk's products.
        query_base = chunk_address(query, row // per.QUERY, chunk_first_token, q_head, spec.T, spec.HQ, spec.K)
        key_base = chunk_address(key, row // per.KEY, chunk_first_token, k_head, spec.T, spec.HK, spec.K)
        value_base = chunk_address(value, row // per.VALUE, chunk_first_token, v_head, spec.T, VALUE_HEADS, spec.V)
        q = load_token_rows(query_base, chunk_first_token, sequence_end, 0, spec.HQ, spec.K, BLOCK_K, spec)
        k = load_token_rows(key_base, chunk_first_token, sequence_end, 0, spec.HK, spec.K, BLOCK_K, spec)
        v = load_token_rows(value_base, chunk_first_token, sequence_end, v_start, VALUE_HEADS, spec.V, BLOCK_V, spec)
        # The state is read, and updated with the chunk, before the chunk's scores are computed: doing both at the same
        # time takes too many registers.
        state = acc.to(q.dtype)
        output_tile = dot(q, state, spec)
        if HAS_W:
            w_base = chunk_address(w, row // per.W, chunk_first_token, head, spec.T, spec.H, spec.K)
            w_tile = load_token_rows(w_base, chunk_first_token, sequence_end, 0, spec.H, spec.K, BLOCK_K, spec)
            # The chunk's writes, U - W S: rounded once, so that state, outputs and gradients use the same values.
            v = (-add_dot(-v.to(tl.float32), w_tile, state, spec)).to(v.dtype)
        read, writes = v, v
        if spec.GATE_CHANNELS == 1:
            gates_base = gates_address(gates, row, head, chunk, spec, per)
            gate_cumsum = load_head_gate_cumsum(gates_base, constant_log2_gate, 0, CHUNK, spec)
            gate_sum = load_head_gate_sum(gates_base, constant_log2_gate, sequence_end - chunk_first_token, spec)
            # The decay from each token to the chunk's end is applied to values, of which a program has fewer than keys.
            weights = decay_to_chunk_end(gate_sum, gate_cumsum, spec)
        if spec.HAS_DT:
            dt_values = load_token_scalars(dt, row // per.DT, chunk_first_token, sequence_end, head, spec)
            weights = weights * dt_values if spec.GATE_CHANNELS == 1 else dt_values
            read = (v.to(tl.float32) * dt_values[:, None]).to(v.dtype)
        if spec.GATE_CHANNELS == 1 or spec.HAS_DT:
            writes = (v.to(tl.float32) * weights[:, None]).to(v.dtype)
        if spec.GATE_CHANNELS == 1:
            output_tile *= tl.exp2(gate_cumsum)[:, None]
            acc *= tl.exp2(gate_sum)
        if spec.QK_ARE_DECAYED:
            acc *= tl.exp2(log2_chunk_decay)[:, None]
        # Tokens past the end have keys and values of 0, so they add nothing; their outputs are not stored.
        acc = add_dot(acc, tl.trans(k), writes, spec)
        if spec.GATE_CHANNELS > 1:
            # The scores are stored masked and in the operands' dtype, so no thread has to convert them.
            output_tile = add_dot(output_tile, tl.load(score_pointers(scores, row, head, chunk, spec)), read, spec)
        else:
            pairs = dot(q, tl.trans(k), spec)
            if spec.GATE_CHANNELS == 1:
                # Also masks: the weights are 0 above the diagonal. Gates are reloaded; `step >> 30` is a 0 that the
                # compiler cannot fold. Kept through the products above they would spill.
                pairs *= pairwise_decay(
                    load_head_gate_cumsum(gates_base + (step >> 30), constant_log2_gate, 0, CHUNK, spec)
                )
            else:
                pairs = tl.where(causal_mask(spec), pairs, 0.0)
            output_tile = add_dot(output_tile, pairs.to(v.dtype), read, spec)
        # The output is scaled; the skip is not.
        output_tile *= spec.OUTPUT_SCALE
        if spec.HAS_SKIP:
            output_tile += v.to(tl.float32) * skip_weight
        target = chunk_address(output, row, chunk_first_token, head, spec.T, spec.H, spec.V)
        store_token_rows(target, output_tile, chunk_first_token, sequence_end, v_start, spec.H, spec.V, spec)
    state_offset = ((tl.cast(row, tl.int64) * spec.NUM_SEQUENCES + sequence) * spec.H + head) * (spec.K * spec.V)
    if PACKED:
        if scan_index < 0:
            store_padding_zeros(output, padded_cu_seqlens, row, head, v_start, BLOCK_V, spec, per)
        else:
            store_state(final_states + state_offset, acc, 0, v_start, spec)
    else:
        store_state(final_states + state_offset, acc, 0, v_start, spec)
