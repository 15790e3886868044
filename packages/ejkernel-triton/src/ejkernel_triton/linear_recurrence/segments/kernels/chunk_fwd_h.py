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
    load_transposed_token_rows,
    sequence_index_of_scan,
    state_address,
    store_state,
    store_token_rows,
)
from ejkernel_triton.linear_recurrence.segments.kernels.chunks_until_decayed import (
    load_chunks_until_decayed,
    max_chunks_until_decayed,
)


@triton.jit
def decay_state_and_keys(acc, keys_or_queries, gates, gate_sum, dt_values, REVERSE: tl.constexpr, spec: tl.constexpr):
    """Returns the decayed state, and the tokens' keys (or, in reverse, queries) with the decay from or to them.

    Args:
        acc: [BLOCK_K, BLOCK_V] state.
        keys_or_queries: [BLOCK_K, CHUNK_SIZE] keys, or queries.
        gates: Cumulative gates, [CHUNK_SIZE] or [BLOCK_K, CHUNK_SIZE].
        gate_sum: The last cumulative gate, a scalar or [BLOCK_K].
        dt_values: [CHUNK_SIZE] dt.
    """
    if spec.GATE_CHANNELS > 0:
        if REVERSE:
            # Decay from the chunk's first token to each query.
            token_decay = tl.exp2(gates)
        else:
            # Decay from each token to the chunk's end. Sums decrease from token to token, so no exponent is positive.
            token_decay = decay_to_chunk_end(gate_sum if spec.GATE_CHANNELS == 1 else gate_sum[:, None], gates, spec)
        if spec.GATE_CHANNELS == 1:
            if spec.HAS_DT and not REVERSE:
                token_decay = token_decay * dt_values
            token_decay = token_decay[None, :]
            acc *= tl.exp2(gate_sum)
        else:
            if spec.HAS_DT and not REVERSE:
                token_decay = token_decay * dt_values[None, :]
            acc *= tl.exp2(gate_sum)[:, None]
        # Applied to keys instead of values, since these gates differ by key channel.
        keys_or_queries = (keys_or_queries.to(tl.float32) * token_decay).to(keys_or_queries.dtype)
    else:
        if spec.HAS_DT and not REVERSE:
            keys_or_queries = (keys_or_queries.to(tl.float32) * dt_values[None, :]).to(keys_or_queries.dtype)
    return acc, keys_or_queries


@triton.jit
def chunk_fwd_h_kernel(
    keys_or_queries,
    values_or_cotangent,
    gates,
    dt,
    initial_states,
    w,
    padded_cu_seqlens,
    chunk_offsets,
    sequences_by_length,
    chunks_until_decayed,
    states,
    final_states,
    v_new,
    spec: tl.constexpr,
    per: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    REVERSE: tl.constexpr,
    HAS_INITIAL_STATES: tl.constexpr,
    STORE_CHUNK_STATES: tl.constexpr,
    HAS_W: tl.constexpr,
    COMPUTE_TRANSITIONS: tl.constexpr,
    FIRST_SCANNED_SEGMENT: tl.constexpr,
    ROW_STARTS_FROM_ZEROS: tl.constexpr,
    NUM_SCANS_WITH_FINAL_STATE: tl.constexpr,
    SUB_SEGMENTS_PER_SEGMENT: tl.constexpr,
    NUM_TILES_OF_CHUNKS_UNTIL_DECAYED: tl.constexpr,
):
    """Passes a tile of one head's state along the chunks of a sequence or segment; see `forward.pass_states`."""
    NUM_COLUMNS: tl.constexpr = spec.V + spec.K if COMPUTE_TRANSITIONS else spec.V
    NUM_K_TILES: tl.constexpr = (spec.K + BLOCK_K - 1) // BLOCK_K
    NUM_V_TILES: tl.constexpr = (NUM_COLUMNS + BLOCK_V - 1) // BLOCK_V
    C: tl.constexpr = spec.CHUNK_SIZE
    program = tl.program_id(0)
    # Tiles of values are the fastest index: programs that run together read the same keys from L2.
    v_start = (program % NUM_V_TILES) * BLOCK_V
    program = program // NUM_V_TILES
    k_start = (program % NUM_K_TILES) * BLOCK_K
    program = program // NUM_K_TILES
    head = program % spec.H
    program = program // spec.H
    row = program // spec.NUM_SEQUENCES
    sequence = sequence_index_of_scan(sequences_by_length, row, program % spec.NUM_SEQUENCES, spec, per)
    first_chunk, end_chunk, sequence_start, sequence_end = load_sequence_bounds(
        padded_cu_seqlens, chunk_offsets, row, sequence + FIRST_SCANNED_SEGMENT, spec, per
    )
    state_offset = ((tl.cast(row, tl.int64) * spec.NUM_SEQUENCES + sequence) * spec.H + head) * (spec.K * NUM_COLUMNS)
    acc = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if HAS_INITIAL_STATES:
        state_row = tl.cast(row // per.INITIAL_STATES, tl.int64) * spec.NUM_SEQUENCES + sequence
        value_pointers = initial_states + (state_row * spec.H + head) * (spec.K * spec.V)
        acc = load_state(value_pointers, k_start, v_start, BLOCK_K, BLOCK_V, spec).to(tl.float32)
    if COMPUTE_TRANSITIONS:
        # The transition of the first segment of a row that starts with zeros is not needed, nor are the final states of
        # the last segments: these programs have no chunks.
        has_no_work = (sequence == 0) & (v_start >= spec.V) & ROW_STARTS_FROM_ZEROS
        has_no_work |= (sequence >= NUM_SCANS_WITH_FINAL_STATE) & (v_start + BLOCK_V <= spec.V)
        if NUM_TILES_OF_CHUNKS_UNTIL_DECAYED > 0:
            # If the state before the segment decays to nothing inside it, nothing passes through, and only the chunks
            # after that determine its final state.
            NUM_SEGMENTS: tl.constexpr = (spec.NUM_CHUNKS + spec.CHUNKS_PER_SEGMENT - 1) // spec.CHUNKS_PER_SEGMENT
            first_contributing_chunk = end_chunk - load_chunks_until_decayed(
                chunks_until_decayed, row, sequence, head, NUM_SEGMENTS, NUM_TILES_OF_CHUNKS_UNTIL_DECAYED, spec
            )
            passes_state = first_chunk >= first_contributing_chunk
            if ROW_STARTS_FROM_ZEROS:
                passes_state &= sequence > 0
            has_transition_columns = v_start + BLOCK_V > spec.V
            first_needed_chunk = tl.where(
                v_start < spec.V, tl.minimum(end_chunk, tl.maximum(first_chunk, first_contributing_chunk)), end_chunk
            )
            first_needed_chunk = tl.where(has_transition_columns & passes_state, first_chunk, first_needed_chunk)
            sequence_start += (first_needed_chunk - first_chunk) * C
            first_chunk = first_needed_chunk
            if v_start == (spec.V // BLOCK_V) * BLOCK_V:
                tl.store(v_new + ((row * spec.NUM_SEQUENCES + sequence) * spec.H + head), passes_state.to(tl.int32))
        end_chunk = tl.where(has_no_work, first_chunk, end_chunk)
        # The columns of the identity follow those of the values.
        identity_columns = v_start - spec.V + tl.arange(0, BLOCK_V)
        acc += (k_start + tl.arange(0, BLOCK_K)[:, None] == identity_columns[None, :]).to(tl.float32)
    key_head = head // (spec.H // KEY_HEADS)
    value_head = head // (spec.H // VALUE_HEADS)
    constant_log2_gate = load_constant_gate(gates, row, head, spec, per)
    if SUB_SEGMENTS_PER_SEGMENT > 0 and spec.GATE_CHANNELS > 0 and not HAS_W:
        # Sub-segments of a segment, whose final states are combined with the decay of those after them: one that decays
        # to nothing before the segment's end, in reverse before its start, is skipped.
        first_segment_chunk = (
            (sequence + FIRST_SCANNED_SEGMENT)
            // SUB_SEGMENTS_PER_SEGMENT
            * (SUB_SEGMENTS_PER_SEGMENT * spec.CHUNKS_PER_SEGMENT)
        )
        segment_end_chunk = tl.minimum(
            first_segment_chunk + SUB_SEGMENTS_PER_SEGMENT * spec.CHUNKS_PER_SEGMENT, spec.NUM_CHUNKS
        )
        num_needed_chunks = max_chunks_until_decayed(
            gates,
            constant_log2_gate,
            row,
            head,
            k_start,
            first_segment_chunk,
            segment_end_chunk,
            BLOCK_K,
            REVERSE,
            spec,
            per,
        )
        if REVERSE:
            end_chunk = tl.maximum(first_chunk, tl.minimum(end_chunk, first_segment_chunk + num_needed_chunks))
        else:
            first_needed_chunk = tl.minimum(end_chunk, tl.maximum(first_chunk, segment_end_chunk - num_needed_chunks))
            sequence_start += (first_needed_chunk - first_chunk) * C
            first_chunk = first_needed_chunk
    next_log2_chunk_decay = load_log2_chunk_decay(gates, row, head, first_chunk, k_start, BLOCK_K, spec, per)
    for step in tl.range(0, end_chunk - first_chunk):
        chunk = end_chunk - 1 - step if REVERSE else first_chunk + step
        first_token = sequence_start + (chunk - first_chunk) * C
        # Prefetched during the previous chunk: the pipeliner copies operands of products only, and these are not
        # operands. Waiting for them in every chunk took a tenth of the scan (docs/lab/linear_recurrence_gpu.md).
        log2_chunk_decay = next_log2_chunk_decay
        next_log2_chunk_decay = load_log2_chunk_decay(gates, row, head, chunk + 1, k_start, BLOCK_K, spec, per)
        # Before the chunk's tokens are added: forwards what `chunk_fwd_o_kernel` reads, in reverse the gradient of the
        # state after the chunk.
        if STORE_CHUNK_STATES:
            store_state(state_address(states, row, head, chunk, spec), acc, k_start, v_start, spec)
        key_base = chunk_address(
            keys_or_queries, row // per.KEYS_OR_QUERIES, first_token, key_head, spec.T, KEY_HEADS, spec.K
        )
        # No address depends on `acc`, so the pipeliner copies the next chunks' tiles during this chunk's product. Three
        # stages suffice: a fourth gains nothing (docs/lab/linear_recurrence_gpu.md).
        key_tile = load_transposed_token_rows(
            key_base, first_token, sequence_end, k_start, KEY_HEADS, spec.K, BLOCK_K, spec
        )
        value_base = chunk_address(
            values_or_cotangent, row // per.VALUES_OR_COTANGENT, first_token, value_head, spec.T, VALUE_HEADS, spec.V
        )
        if COMPUTE_TRANSITIONS:
            # Nothing is written to the identity's columns.
            columns = v_start + tl.arange(0, BLOCK_V)
            valid = (first_token + tl.arange(0, C) < sequence_end)[:, None] & (columns < spec.V)[None, :]
            value_pointers = value_base + (tl.arange(0, C)[:, None] * (VALUE_HEADS * spec.V) + columns[None, :])
            value_tile = tl.load(value_pointers, mask=valid, other=0.0)
        else:
            value_tile = load_token_rows(
                value_base, first_token, sequence_end, v_start, VALUE_HEADS, spec.V, BLOCK_V, spec
            )
        if HAS_W:
            # The product sums over key channels, so BLOCK_K spans all of them (see `forward.pass_states`).
            w_base = chunk_address(w, row // per.W, first_token, head, spec.T, spec.H, spec.K)
            w_tile = load_token_rows(w_base, first_token, sequence_end, k_start, spec.H, spec.K, BLOCK_K, spec)
            # U - W S. The stored values are rounded like the operands below, so that outputs and gradients use the same
            # writes as the state.
            value_tile = (value_tile.to(tl.float32) - dot(w_tile, acc.to(w_tile.dtype), spec)).to(value_tile.dtype)
            if STORE_CHUNK_STATES:
                v_new_address = chunk_address(v_new, row, first_token, head, spec.T, spec.H, spec.V)
                store_token_rows(v_new_address, value_tile, first_token, sequence_end, v_start, spec.H, spec.V, spec)
        dt_values = 0.0
        if spec.HAS_DT and not REVERSE:
            dt_values = load_token_scalars(dt, row // per.DT, first_token, sequence_end, head, spec)
        gate_sum = 0.0
        gate_cumsum = 0.0
        if spec.GATE_CHANNELS > 0 and not spec.QK_ARE_DECAYED:
            gates_base = gates_address(gates, row, head, chunk, spec, per)
            rows = tl.arange(0, C)
            if spec.GATE_CHANNELS == 1:
                gate_cumsum = load_head_gate_cumsum(gates_base, constant_log2_gate, 0, C, spec)
                gate_sum = load_head_gate_sum(gates_base, constant_log2_gate, sequence_end - first_token, spec)
            else:
                columns = k_start + tl.arange(0, BLOCK_K)
                valid = columns < spec.K
                gate_cumsum = tl.load(
                    gates_base + (rows[None, :] * spec.K + columns[:, None]), mask=valid[:, None], other=0.0
                )
                gate_sum = tl.load(gates_base + (C - 1) * spec.K + columns, mask=valid, other=0.0)
        # The decay multiplies `acc` before the product adds to it: this chunk's writes have their decay already.
        if spec.QK_ARE_DECAYED:
            acc *= tl.exp2(log2_chunk_decay)[:, None]
        elif HAS_W and spec.GATE_CHANNELS == 1:
            # Applied to the writes instead of the keys: they are in registers, and have half as many elements.
            acc *= tl.exp2(gate_sum)
            value_tile = (value_tile.to(tl.float32) * tl.exp2(gate_sum - gate_cumsum)[:, None]).to(value_tile.dtype)
        else:
            acc, key_tile = decay_state_and_keys(acc, key_tile, gate_cumsum, gate_sum, dt_values, REVERSE, spec)
        if REVERSE:
            # Scaled in float32 after the product, so that 16-bit queries keep their digits.
            acc += dot(key_tile, value_tile, spec) * spec.OUTPUT_SCALE
        else:
            acc += dot(key_tile, value_tile, spec)
    if COMPUTE_TRANSITIONS:
        key_channels, columns = k_start + tl.arange(0, BLOCK_K), v_start + tl.arange(0, BLOCK_V)
        num_stored_columns = NUM_COLUMNS
        if NUM_TILES_OF_CHUNKS_UNTIL_DECAYED > 0:
            num_stored_columns = tl.where(passes_state, NUM_COLUMNS, spec.V)  # unused transitions are not read
        in_bounds = (key_channels < spec.K)[:, None] & (columns < num_stored_columns)[None, :]
        tl.store(
            final_states + state_offset + (key_channels[:, None] * NUM_COLUMNS + columns[None, :]), acc, mask=in_bounds
        )
    elif SUB_SEGMENTS_PER_SEGMENT > 0 and spec.HAS_CONSTANT_GATES:
        if end_chunk > first_chunk:  # `decayed_initial_states_kernel` does not read the others
            store_state(final_states + state_offset, acc, k_start, v_start, spec)
    else:
        store_state(final_states + state_offset, acc, k_start, v_start, spec)
