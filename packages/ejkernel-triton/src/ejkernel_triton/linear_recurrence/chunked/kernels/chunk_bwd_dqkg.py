"""Computes gradients of queries, keys and gates of all chunks in parallel; the formulas are in `chunk_bwd_dv`."""

import triton
import triton.language as tl

from ejkernel_triton.blocks import add_dot, dot
from ejkernel_triton.linear_recurrence.chunked.kernels.chunk_bwd_dv import store_token_scalars
from ejkernel_triton.linear_recurrence.kernels.tile import (
    chunk_address,
    chunk_start_and_sequence_end,
    decay_to_chunk_end,
    diagonal_mask,
    gates_address,
    gates_relative_to_middle,
    half_block_pair_mask,
    load_channel_gate_cumsum,
    load_channel_gate_sum,
    load_constant_gate,
    load_head_gate_cumsum,
    load_head_gate_sum,
    load_state,
    load_token_rows,
    load_token_scalars,
    load_vector_as_two_columns,
    midpoint_decay,
    pairwise_decay,
    state_address,
    store_token_rows,
)

MIN_LOG2_GATE_WITH_GRADIENT = tl.constexpr(-57.5)
"""log2 gates below this have no gradient: `chunk_local_cumsum_kernel` raises them all to -58, a constant."""


@triton.jit
def reload_chunk_tiles(chunk_pointers_and_bounds, base, column, level, COLUMNS: tl.constexpr, spec: tl.constexpr):
    """Loads queries, keys and cumulative gates of a chunk once more, inside the loop that uses them.

    The opaque offset keeps the compiler from hoisting the loads out of the loop, where their tiles would spill.
    """
    query_base, key_base, first_token, sequence_end = chunk_pointers_and_bounds
    opaque_zero = level >> 5  # 0, which the compiler cannot fold
    q = load_token_rows(query_base + opaque_zero, first_token, sequence_end, column, spec.HQ, spec.K, COLUMNS, spec)
    k = load_token_rows(key_base + opaque_zero, first_token, sequence_end, column, spec.HK, spec.K, COLUMNS, spec)
    return q.to(tl.float32), k.to(tl.float32), load_channel_gate_cumsum(base + opaque_zero, column, COLUMNS, spec)


@triton.jit
def add_channel_gradients(
    dq,
    dk,
    dscores_acc,
    query,
    key,
    gates,
    base,
    column,
    chunk_pointers_and_bounds,
    COLUMNS: tl.constexpr,
    spec: tl.constexpr,
):
    """Returns dq plus sum_j w_ijk pairs_ij k_jk, and dk plus sum_i w_ijk pairs_ij q_ik.

    These are the transposed products of `intra_chunk_scores`.

    Args:
        dq: [CHUNK_SIZE, COLUMNS] float32.
        dk: [CHUNK_SIZE, COLUMNS] float32.
        dscores_acc: [CHUNK_SIZE, CHUNK_SIZE] float32, gradients of the scores by (i, j), 0 for j > i.
        query: [CHUNK_SIZE, COLUMNS].
        key: [CHUNK_SIZE, COLUMNS].
        gates: [CHUNK_SIZE, COLUMNS] cumulative gates.
        base: Address of the gates.
        column: First key channel.
        chunk_pointers_and_bounds: Pointers to the chunk's queries and keys, its first token and its sequence's end.
    """
    # The caller loaded the tiles for the first branch; the second one loads them again (see `reload_chunk_tiles`).
    relative_gates, factors_fit = gates_relative_to_middle(gates, base, column, COLUMNS, spec)
    q, k = query.to(tl.float32), key.to(tl.float32)
    if factors_fit:
        # One product each: the decay of the contracted token multiplies the operand, that of the row the result.
        dscores = dscores_acc.to(query.dtype)
        decay_since, decay_until = tl.exp2(relative_gates), tl.exp2(-relative_gates)
        dq += decay_since * dot(dscores, (k * decay_until).to(key.dtype), spec)
        dk += decay_until * dot(tl.trans(dscores), (q * decay_since).to(query.dtype), spec)
    else:
        # A token with itself has no decay, and is in no block of `midpoint_decay`.
        diagonal_dscores = tl.sum(tl.where(diagonal_mask(spec), dscores_acc, 0.0), 1)[:, None]
        dq += diagonal_dscores * k
        dk += diagonal_dscores * q
        LEVELS: tl.constexpr = spec.LOG2_CHUNK
        for level in tl.range(0, LEVELS, num_stages=1):
            # Reloaded from L2 at each level: three float32 tiles that live through the loop spill registers.
            q, k, gate_cumsum = reload_chunk_tiles(chunk_pointers_and_bounds, base, column, level, COLUMNS, spec)
            weights = midpoint_decay(gate_cumsum, base, column, level, COLUMNS, spec)
            dscores = tl.where(half_block_pair_mask(level, spec), dscores_acc, 0.0).to(query.dtype)
            dq += weights * dot(dscores, (k * weights).to(key.dtype), spec)
            dk += weights * dot(tl.trans(dscores), (q * weights).to(query.dtype), spec)
    return dq, dk


@triton.jit
def state_gradient_products(
    value_pointers_and_bounds,
    k_start,
    COMPUTE_GATE_GRADIENTS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    spec: tl.constexpr,
):
    """Returns dS v_j of a chunk's tokens, [CHUNK_SIZE, BLOCK_K], and <dS, S_0> of each key channel if
    COMPUTE_GATE_GRADIENTS.

    Args:
        value_pointers_and_bounds: Pointers to values, S_0 and dS, the chunk's first token and its sequence's end.
        k_start: First key channel.
    """
    value_base, states_base, dstates_base, first_token, sequence_end = value_pointers_and_bounds
    CHUNK: tl.constexpr = spec.CHUNK_SIZE
    dk = tl.zeros([CHUNK, BLOCK_K], tl.float32)
    state_product = tl.zeros([BLOCK_K], tl.float32)
    for v_start in tl.range(0, spec.V, BLOCK_V):
        v = load_token_rows(value_base, first_token, sequence_end, v_start, VALUE_HEADS, spec.V, BLOCK_V, spec)
        ds = load_state(dstates_base, k_start, v_start, BLOCK_K, BLOCK_V, spec)
        dk = add_dot(dk, v.to(ds.dtype), tl.trans(ds), spec)
        if COMPUTE_GATE_GRADIENTS:
            s = load_state(states_base, k_start, v_start, BLOCK_K, BLOCK_V, spec)
            # S_0 decays through the whole chunk, which contributes to the gradient of the last token's gate.
            state_product += tl.sum(s.to(tl.float32) * ds.to(tl.float32), 1)
    return dk, state_product


@triton.jit
def chunk_bwd_dqkg_kernel(
    query,
    key,
    value,
    gates,
    dt,
    cotangent,
    states,
    dstates,
    chunk_starts,
    sequence_ends,
    dquery,
    dkey,
    dgates,
    spec: tl.constexpr,
    per: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HEADS_PER_PROGRAM: tl.constexpr,
    COMPUTE_GATE_GRADIENTS: tl.constexpr,
    LOAD_VECTORS_AS_TWO_COLUMNS: tl.constexpr,
):
    """Computes the gradients of one chunk's queries, keys and gates; see `backward.key_gradients`."""
    NUM_K_TILES: tl.constexpr = (spec.K + BLOCK_K - 1) // BLOCK_K
    CHUNK: tl.constexpr = spec.CHUNK_SIZE
    NUM_GROUPS: tl.constexpr = spec.H // HEADS_PER_PROGRAM
    # Gradients of queries or keys with H heads are stored head by head; those of shared heads after the loop.
    Q_HEADS: tl.constexpr = spec.H if spec.HQ == spec.H else NUM_GROUPS
    K_HEADS: tl.constexpr = spec.H if spec.HK == spec.H else NUM_GROUPS
    program = tl.program_id(0)
    tile = program % NUM_K_TILES
    k_start = tile * BLOCK_K
    program = program // NUM_K_TILES
    group = program % NUM_GROUPS
    program = program // NUM_GROUPS
    chunk = program % spec.NUM_CHUNKS
    row = program // spec.NUM_CHUNKS
    first_token, sequence_end = chunk_start_and_sequence_end(chunk_starts, sequence_ends, row, chunk, spec, per)
    rows = tl.arange(0, CHUNK)
    dq_sum = tl.zeros([CHUNK, BLOCK_K], tl.float32)
    dk_sum = tl.zeros([CHUNK, BLOCK_K], tl.float32)
    for head_in_group in tl.range(0, HEADS_PER_PROGRAM):
        head = group * HEADS_PER_PROGRAM + head_in_group
        v_head = head // (spec.H // VALUE_HEADS)
        value_base = chunk_address(value, row // per.VALUE, first_token, v_head, spec.T, VALUE_HEADS, spec.V)
        do_base = chunk_address(cotangent, row // per.COTANGENT, first_token, head, spec.T, spec.H, spec.V)
        states_base = state_address(states, row, head, chunk, spec)
        dstates_base = state_address(dstates, row, head, chunk, spec)
        gates_base = gates_address(gates, row, head, chunk, spec, per)
        constant_log2_gate = load_constant_gate(gates, row, head, spec, per)
        # Queries first: the gradients of scores, and the product with S_0, which share the tiles of do.
        dscores_acc = tl.zeros([CHUNK, CHUNK], tl.float32)
        dq = tl.zeros([CHUNK, BLOCK_K], tl.float32)
        for v_start in tl.range(0, spec.V, BLOCK_V):
            do = load_token_rows(do_base, first_token, sequence_end, v_start, spec.H, spec.V, BLOCK_V, spec)
            v = load_token_rows(value_base, first_token, sequence_end, v_start, VALUE_HEADS, spec.V, BLOCK_V, spec)
            s = load_state(states_base, k_start, v_start, BLOCK_K, BLOCK_V, spec)
            dscores_acc = add_dot(dscores_acc, do, tl.trans(v), spec)
            dq = add_dot(dq, do.to(s.dtype), tl.trans(s), spec)
        value_pointers_and_bounds = (value_base, states_base, dstates_base, first_token, sequence_end)
        q_head = head // (spec.H // spec.HQ)
        k_head = head // (spec.H // spec.HK)
        query_base = chunk_address(query, row // per.QUERY, first_token, q_head, spec.T, spec.HQ, spec.K)
        key_base = chunk_address(key, row // per.KEY, first_token, k_head, spec.T, spec.HK, spec.K)
        q = load_token_rows(query_base, first_token, sequence_end, k_start, spec.HQ, spec.K, BLOCK_K, spec)
        k = load_token_rows(key_base, first_token, sequence_end, k_start, spec.HK, spec.K, BLOCK_K, spec)
        dq *= spec.OUTPUT_SCALE
        dscores_acc *= spec.OUTPUT_SCALE
        if spec.HAS_DT:
            if LOAD_VECTORS_AS_TWO_COLUMNS:
                dt_base = chunk_address(dt, row // per.DT, first_token, head, spec.T, spec.H, 1)
                dt_values = load_vector_as_two_columns(dt_base + rows * spec.H, first_token + rows < sequence_end, True)
            else:
                dt_values = load_token_scalars(dt, row // per.DT, first_token, sequence_end, head, spec)
            # dt belongs to the written token, which is the column.
            dscores_acc *= dt_values[None, :]
        if spec.GATE_CHANNELS > 1:
            # With gates per key channel both gradients stay in registers, since each level adds to both.
            dk, state_product = state_gradient_products(
                value_pointers_and_bounds, k_start, COMPUTE_GATE_GRADIENTS, VALUE_HEADS, BLOCK_K, BLOCK_V, spec
            )
            if spec.HAS_DT:
                dk *= dt_values[:, None]
            gate_cumsum = load_channel_gate_cumsum(gates_base, k_start, BLOCK_K, spec)
            gate_sum = load_channel_gate_sum(gates_base, k_start, BLOCK_K, spec)
            dq *= tl.exp2(gate_cumsum)
            dk *= tl.exp2(gate_sum[None, :] - gate_cumsum)
            state_product = state_product * tl.exp2(gate_sum) + tl.sum(dk * k.to(tl.float32), 0)
            # Masked before `add_channel_gradients`, whose factors above the diagonal are large but finite: their
            # product is 0.
            dscores_acc = tl.where(rows[:, None] >= rows[None, :], dscores_acc, 0.0)
            dq, dk = add_channel_gradients(
                dq,
                dk,
                dscores_acc,
                q,
                k,
                gate_cumsum,
                gates_base,
                k_start,
                (query_base, key_base, first_token, sequence_end),
                BLOCK_K,
                spec,
            )
            if COMPUTE_GATE_GRADIENTS:
                # G_t increases what query t reads, and decreases what later queries read of key t: q dq - k dk. The
                # term of a token with itself cancels.
                dgate = dq * q.to(tl.float32) - dk * k.to(tl.float32)
                # Reverse cumulative sum, from each token to the chunk's end: the total minus the sum of the earlier
                # tokens.
                dgate = (tl.sum(dgate, 0) + state_product)[None, :] - (tl.cumsum(dgate, 0) - dgate)
                columns = k_start + tl.arange(0, BLOCK_K)
                valid = (rows > 0)[:, None] & (columns < spec.K)[None, :]
                # The gate is the difference of consecutive cumulative gates; the first one is the sum itself.
                previous_gate_cumsum = tl.load(
                    gates_base + ((rows - 1)[:, None] * spec.K + columns[None, :]), mask=valid, other=0.0
                )
                dgate = tl.where(gate_cumsum - previous_gate_cumsum < MIN_LOG2_GATE_WITH_GRADIENT, 0.0, dgate)
                at = chunk_address(dgates, row, first_token, head, spec.T, spec.H, spec.K)
                store_token_rows(at, dgate, first_token, sequence_end, k_start, spec.H, spec.K, spec)
        else:
            if spec.GATE_CHANNELS == 1:
                gate_cumsum = (
                    load_vector_as_two_columns(gates_base + rows, rows >= 0, False)
                    if LOAD_VECTORS_AS_TWO_COLUMNS
                    else load_head_gate_cumsum(gates_base, constant_log2_gate, 0, CHUNK, spec)
                )
                dq *= tl.exp2(gate_cumsum)[:, None]
                # Also masks: the weights are 0 above the diagonal.
                dscores_acc *= pairwise_decay(gate_cumsum)
            else:
                dscores_acc = tl.where(rows[:, None] >= rows[None, :], dscores_acc, 0.0)
            dscores = dscores_acc.to(q.dtype)
            dq = add_dot(dq, dscores, k, spec)
            # Register pressure: the gradient of queries is stored before that of keys is computed.
            if COMPUTE_GATE_GRADIENTS:
                dgate = tl.sum(dq * q.to(tl.float32), 1)
            if spec.HQ == spec.H:
                at = chunk_address(dquery, row, first_token, head, spec.T, Q_HEADS, spec.K)
                store_token_rows(at, dq, first_token, sequence_end, k_start, Q_HEADS, spec.K, spec)
            else:
                dq_sum += dq
            # Values are loaded a second time. One loop for both gradients takes 245 registers, two loops 168
            # (docs/lab/linear_recurrence_gpu.md).
            dk, state_product = state_gradient_products(
                value_pointers_and_bounds, k_start, COMPUTE_GATE_GRADIENTS, VALUE_HEADS, BLOCK_K, BLOCK_V, spec
            )
            if spec.HAS_DT:
                dk *= dt_values[:, None]
            if spec.GATE_CHANNELS == 1:
                gate_sum = load_head_gate_sum(gates_base, constant_log2_gate, sequence_end - first_token, spec)
                dk *= decay_to_chunk_end(gate_sum, gate_cumsum, spec)[:, None]
                state_product *= tl.exp2(gate_sum)
            if COMPUTE_GATE_GRADIENTS:
                # Before the chunk's own terms are added to dk: the last gate scales only what passes through dS.
                gate_sum_gradient = tl.sum(state_product, 0) + tl.sum(tl.sum(dk * k.to(tl.float32), 1), 0)
            dk = add_dot(dk, tl.trans(dscores), q, spec)
            if COMPUTE_GATE_GRADIENTS:
                dgate -= tl.sum(dk * k.to(tl.float32), 1)
                # Reverse cumulative sum, from each token to the chunk's end: the total minus the sum of the earlier
                # tokens.
                dgate = tl.sum(dgate, 0) + gate_sum_gradient - (tl.cumsum(dgate, 0) - dgate)
                if spec.HAS_CONSTANT_GATES:
                    dgate = tl.where(constant_log2_gate < MIN_LOG2_GATE_WITH_GRADIENT, 0.0, dgate)
                elif spec.GATE_CHANNELS == 1:
                    previous_gate_cumsum = tl.load(gates_base + rows - 1, mask=rows > 0, other=0.0)
                    dgate = tl.where(gate_cumsum - previous_gate_cumsum < MIN_LOG2_GATE_WITH_GRADIENT, 0.0, dgate)
                store_token_scalars(dgates, dgate, row, first_token, sequence_end, tile, NUM_K_TILES, head, spec)
        if spec.GATE_CHANNELS > 1:
            if spec.HQ == spec.H:
                at = chunk_address(dquery, row, first_token, head, spec.T, Q_HEADS, spec.K)
                store_token_rows(at, dq, first_token, sequence_end, k_start, Q_HEADS, spec.K, spec)
            else:
                dq_sum += dq
        if spec.HK == spec.H:
            at = chunk_address(dkey, row, first_token, head, spec.T, K_HEADS, spec.K)
            store_token_rows(at, dk, first_token, sequence_end, k_start, K_HEADS, spec.K, spec)
        else:
            dk_sum += dk
    if spec.HQ != spec.H:
        at = chunk_address(dquery, row, first_token, group, spec.T, Q_HEADS, spec.K)
        store_token_rows(at, dq_sum, first_token, sequence_end, k_start, Q_HEADS, spec.K, spec)
    if spec.HK != spec.H:
        at = chunk_address(dkey, row, first_token, group, spec.T, K_HEADS, spec.K)
        store_token_rows(at, dk_sum, first_token, sequence_end, k_start, K_HEADS, spec.K, spec)
