"""Computes gradients of queries, keys, gates and beta; the formulas are in `chunk_bwd_dhu`."""

import triton
import triton.language as tl

from ejkernel_triton.blocks import add_dot, dot
from ejkernel_triton.linear_recurrence.chunked.kernels.chunk_bwd_dqkg import (
    MIN_LOG2_GATE_WITH_GRADIENT,
    state_gradient_products,
)
from ejkernel_triton.linear_recurrence.chunked.kernels.chunk_bwd_dv import store_token_scalars
from ejkernel_triton.linear_recurrence.delta.kernels.sub_chunks import (
    FROM_MIDDLE_MATRIX_INDEX,
    SINCE_START_MATRIX_INDEX,
    TO_LEVEL_MIDPOINT_MATRIX_INDEX,
    UNTIL_END_MATRIX_INDEX,
    level_pair_mask,
    load_log_gates,
    multiply_by_decay,
    split_gates_high_low,
    sub_chunk_pair_mask,
    sum_gates,
)
from ejkernel_triton.linear_recurrence.kernels.tile import (
    chunk_address,
    chunk_start_and_sequence_end,
    diagonal_mask,
    gates_address,
    load_state,
    load_token_rows,
    load_token_scalars,
    pairwise_decay,
    state_address,
    store_token_rows,
)


@triton.jit
def add_delta_channel_gradients(
    dq,
    dr,
    dk,
    dqk_scores,
    dkk_scores,
    query,
    key,
    betas,
    gates_high,
    gates_low,
    gate_sum_matrix_address,
    spec: tl.constexpr,
):
    """Adds the transposed products of `sub_chunk_scores` of both reads, of queries and of keys, to their gradients.

    Only the reading key is multiplied by beta: as a query it is beta k, as the key of a write k.

    Args:
        dq: [CHUNK_SIZE, COLUMNS] float32.
        dr: [CHUNK_SIZE, COLUMNS] float32, gradients of keys as queries, without beta.
        dk: [CHUNK_SIZE, COLUMNS] float32, gradients of keys as keys of both reads.
        dqk_scores: [CHUNK_SIZE, CHUNK_SIZE], gradients of the queries' scores by (i, j), for j <= i; others are not
            used.
        dkk_scores: [CHUNK_SIZE, CHUNK_SIZE], the same of the keys, without beta; 0 for j >= i.
        query: [CHUNK_SIZE, COLUMNS].
        key: [CHUNK_SIZE, COLUMNS].
        betas: [CHUNK_SIZE].
        gates_high: [CHUNK_SIZE, COLUMNS], from `split_gates_high_low`.
        gates_low: [CHUNK_SIZE, COLUMNS], from `split_gates_high_low`.
        gate_sum_matrix_address: Address of the matrices of `sum_gates`.
        spec: Constants.
    """
    # A token with itself has no decay, and no token sees its own key. Products and sums are in float32, so that these
    # terms cancel in the gradient of the gates, q dq - k dk, of which they would be the largest where gates are strong.
    diagonal_dscores = tl.sum(tl.where(diagonal_mask(spec), dqk_scores, 0.0).to(tl.float32), 1)[:, None]
    dq += diagonal_dscores * key.to(tl.float32)
    dk += diagonal_dscores * query.to(tl.float32)
    FIRST_LEVEL: tl.constexpr = spec.LOG2_SUB_CHUNK
    NUM_LEVELS: tl.constexpr = spec.LOG2_CHUNK
    for level in tl.range(FIRST_LEVEL, NUM_LEVELS, num_stages=1, disable_licm=True):
        decay = tl.exp2(
            sum_gates(gate_sum_matrix_address, TO_LEVEL_MIDPOINT_MATRIX_INDEX + level, gates_high, gates_low, spec)
        )
        decayed_keys = multiply_by_decay(key, decay)
        masked_dqk_scores = tl.where(level_pair_mask(level, spec), dqk_scores, 0.0).to(key.dtype)
        dq += decay * dot(masked_dqk_scores, decayed_keys, spec)
        key_gradient_acc = dot(tl.trans(masked_dqk_scores), multiply_by_decay(query, decay), spec)
        masked_dkk_scores = tl.where(level_pair_mask(level, spec), dkk_scores, 0.0).to(key.dtype)
        dr += decay * dot(masked_dkk_scores, decayed_keys, spec)
        key_gradient_acc = add_dot(
            key_gradient_acc, tl.trans(masked_dkk_scores), multiply_by_decay(key, decay * betas[:, None]), spec
        )
        dk += decay * key_gradient_acc
    if spec.SUB_CHUNK_SIZE > 1:
        relative_gates = sum_gates(gate_sum_matrix_address, FROM_MIDDLE_MATRIX_INDEX, gates_high, gates_low, spec)
        decay_since, decay_until = tl.exp2(relative_gates), tl.exp2(-relative_gates)
        decayed_keys = multiply_by_decay(key, decay_until)
        # Other pairs are 0, and the factors are finite.
        masked_dqk_scores = tl.where(sub_chunk_pair_mask(spec) & ~diagonal_mask(spec), dqk_scores, 0.0).to(key.dtype)
        dq += decay_since * dot(masked_dqk_scores, decayed_keys, spec)
        key_gradient_acc = dot(tl.trans(masked_dqk_scores), multiply_by_decay(query, decay_since), spec)
        masked_dkk_scores = tl.where(sub_chunk_pair_mask(spec), dkk_scores, 0.0).to(key.dtype)
        dr += decay_since * dot(masked_dkk_scores, decayed_keys, spec)
        key_gradient_acc = add_dot(
            key_gradient_acc, tl.trans(masked_dkk_scores), multiply_by_decay(key, decay_since * betas[:, None]), spec
        )
        dk += decay_until * key_gradient_acc
    return dq, dr, dk


@triton.jit
def multiply_cotangents(
    cotangent_base,
    v_new_base,
    states_base,
    first_token,
    sequence_end,
    k_start,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    spec: tl.constexpr,
):
    """Returns <c_i, x_j> [CHUNK_SIZE, CHUNK_SIZE] of cotangents c and writes x, and S c_i [CHUNK_SIZE, BLOCK_K]."""
    CHUNK: tl.constexpr = spec.CHUNK_SIZE
    pairs = tl.zeros([CHUNK, CHUNK], tl.float32)
    state_products = tl.zeros([CHUNK, BLOCK_K], tl.float32)
    for v_start in tl.range(0, spec.V, BLOCK_V):
        c = load_token_rows(cotangent_base, first_token, sequence_end, v_start, spec.H, spec.V, BLOCK_V, spec)
        x = load_token_rows(v_new_base, first_token, sequence_end, v_start, spec.H, spec.V, BLOCK_V, spec)
        s = load_state(states_base, k_start, v_start, BLOCK_K, BLOCK_V, spec)
        # Both products read the cotangent, so they share its tiles.
        pairs = add_dot(pairs, c, tl.trans(x), spec)
        state_products = add_dot(state_products, c.to(s.dtype), tl.trans(s), spec)
    return pairs, state_products


@triton.jit
def store_or_add_to_group(
    gradient,
    group_sum,
    tile,
    group,
    head_in_group,
    tile_location,
    NUM_FIELD_HEADS: tl.constexpr,
    HEADS_PER_PROGRAM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    spec: tl.constexpr,
):
    """Stores a head's gradient of queries or keys, which is added to that of the group's earlier heads if they share
    these queries or keys.

    Args:
        gradient: [B, T, H, K] of unshared queries or keys, [B, T, groups, K] of shared ones.
        group_sum: [B, T, groups, K] float32, the sum over the heads so far; not read if nothing is shared.
        tile: [CHUNK_SIZE, BLOCK_K] float32, the head's gradient.
        group: Index of the group, which is the program's heads.
        head_in_group: Index of the head in its group.
        tile_location: The batch row, the chunk's first token, its sequence's end, and the first key channel.
        NUM_FIELD_HEADS: Heads of the queries or keys, a divisor of H; H if heads do not share them.
        HEADS_PER_PROGRAM: Heads of the group.
        BLOCK_K: Key channels of the tile.
        spec: Constants.
    """
    row, first_token, sequence_end, k_start = tile_location
    NUM_GROUPS: tl.constexpr = spec.H // HEADS_PER_PROGRAM
    if NUM_FIELD_HEADS == spec.H or HEADS_PER_PROGRAM == 1:
        head = group * HEADS_PER_PROGRAM + head_in_group
        address = chunk_address(gradient, row, first_token, head, spec.T, spec.H, spec.K)
        store_token_rows(address, tile, first_token, sequence_end, k_start, spec.H, spec.K, spec)
    else:
        # The sum waits in memory, which L2 holds for a program's few heads: in registers it would spill.
        sum_address = chunk_address(group_sum, row, first_token, group, spec.T, NUM_GROUPS, spec.K)
        if head_in_group > 0:
            tl.debug_barrier()  # other threads may have stored the elements that a thread loads
            tile += load_token_rows(sum_address, first_token, sequence_end, k_start, NUM_GROUPS, spec.K, BLOCK_K, spec)
        if head_in_group < HEADS_PER_PROGRAM - 1:
            store_token_rows(sum_address, tile, first_token, sequence_end, k_start, NUM_GROUPS, spec.K, spec)
        else:
            address = chunk_address(gradient, row, first_token, group, spec.T, NUM_GROUPS, spec.K)
            store_token_rows(address, tile, first_token, sequence_end, k_start, NUM_GROUPS, spec.K, spec)


@triton.jit
def chunk_bwd_dqkwg_kernel(
    query,
    key,
    v_new,
    gates,
    decay,
    beta,
    cotangent,
    dy,
    states,
    dstates,
    gate_sum_matrix_address,
    chunk_starts,
    sequence_ends,
    dquery,
    dkey,
    dquery_group_sum,
    dkey_group_sum,
    dgates,
    dbeta,
    spec: tl.constexpr,
    per: tl.constexpr,
    T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HEADS_PER_PROGRAM: tl.constexpr,
    COMPUTE_GATE_GRADIENTS: tl.constexpr,
):
    """Computes gradients of BLOCK_K channels of queries and keys in one chunk, of gates and of beta, for the
    HEADS_PER_PROGRAM heads of a group, one after the other.

    If these share queries or keys, the gradients of those are summed over the group; see `store_or_add_to_group`.
    """
    NUM_K_TILES: tl.constexpr = (spec.K + BLOCK_K - 1) // BLOCK_K
    NUM_GROUPS: tl.constexpr = spec.H // HEADS_PER_PROGRAM
    CHUNK: tl.constexpr = spec.CHUNK_SIZE
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
    strictly_earlier = rows[:, None] > rows[None, :]
    tile_location = (row, first_token, sequence_end, k_start)
    # Nothing is moved out of the loop: offsets of whole tiles would take registers throughout.
    for head_in_group in tl.range(0, HEADS_PER_PROGRAM, num_stages=1, disable_licm=True):
        head = group * HEADS_PER_PROGRAM + head_in_group
        v_new_base = chunk_address(v_new, row // per.V_NEW, first_token, head, spec.T, spec.H, spec.V)
        do_base = chunk_address(cotangent, row // per.COTANGENT, first_token, head, spec.T, spec.H, spec.V)
        dy_base = chunk_address(dy, row // per.DY, first_token, head, spec.T, spec.H, spec.V)
        states_base = state_address(states, row, head, chunk, spec)
        dstates_base = state_address(dstates, row, head, chunk, spec)
        query_base = chunk_address(
            query, row // per.QUERY, first_token, head // (spec.H // spec.HQ), spec.T, spec.HQ, spec.K
        )
        key_base = chunk_address(key, row // per.KEY, first_token, head // (spec.H // spec.HK), spec.T, spec.HK, spec.K)
        betas = load_token_scalars(beta, row // per.BETA, first_token, sequence_end, head, spec)
        value_operands = (v_new_base, states_base, dstates_base, first_token, sequence_end)
        # Ordered by register pressure: queries, then keys read as queries, then keys; each is stored before the next.
        dscores, dq = multiply_cotangents(
            do_base, v_new_base, states_base, first_token, sequence_end, k_start, BLOCK_K, BLOCK_V, spec
        )
        q = load_token_rows(query_base, first_token, sequence_end, k_start, spec.HQ, spec.K, BLOCK_K, spec)
        k = load_token_rows(key_base, first_token, sequence_end, k_start, spec.HK, spec.K, BLOCK_K, spec)
        dq *= spec.OUTPUT_SCALE
        dscores *= spec.OUTPUT_SCALE
        if spec.GATE_CHANNELS > 1:
            # Gates per key channel: each level adds to all gradients. Pairs are kept at 16 bits, in half of the
            # registers.
            dqk_scores = dscores.to(q.dtype)
            dscores, dr = multiply_cotangents(
                dy_base, v_new_base, states_base, first_token, sequence_end, k_start, BLOCK_K, BLOCK_V, spec
            )
            # The second read: the key as a query, with -dy as its cotangent. A key reads what earlier tokens wrote, not
            # its own write: strictly below the diagonal.
            dkk_scores = tl.where(strictly_earlier, -dscores, 0.0).to(k.dtype)
            dk, state_product = state_gradient_products(
                value_operands, k_start, COMPUTE_GATE_GRADIENTS, spec.H, BLOCK_K, BLOCK_V, spec
            )
            dstates_base = chunk_address(decay, row // per.DECAY, first_token * (T > 1), head, T, spec.H, spec.K)
            gate_cumsum = load_log_gates(
                dstates_base, first_token, sequence_end, k_start, (T > 1) * spec.H * spec.K, BLOCK_K, spec
            )
            gates_high, gates_low = split_gates_high_low(gate_cumsum, k.dtype)
            decay_since = tl.exp2(
                sum_gates(gate_sum_matrix_address, SINCE_START_MATRIX_INDEX, gates_high, gates_low, spec)
            )
            dq *= decay_since
            dr *= -decay_since
            dk *= tl.exp2(sum_gates(gate_sum_matrix_address, UNTIL_END_MATRIX_INDEX, gates_high, gates_low, spec))
            state_product = state_product * tl.exp2(tl.sum(gate_cumsum, 0)) + tl.sum(dk * k.to(tl.float32), 0)
            dq, dr, dk = add_delta_channel_gradients(
                dq, dr, dk, dqk_scores, dkk_scores, q, k, betas, gates_high, gates_low, gate_sum_matrix_address, spec
            )
            store_or_add_to_group(
                dquery,
                dquery_group_sum,
                dq,
                group,
                head_in_group,
                tile_location,
                spec.HQ,
                HEADS_PER_PROGRAM,
                BLOCK_K,
                spec,
            )
            dgate = dq * q.to(tl.float32)
            store_token_scalars(
                dbeta, tl.sum(dr * k.to(tl.float32), 1), row, first_token, sequence_end, tile, NUM_K_TILES, head, spec
            )
            # dbeta above needs the product without beta; from here on it includes beta, so that no gradient is divided
            # by beta.
            dr *= betas[:, None]
            store_or_add_to_group(
                dkey,
                dkey_group_sum,
                dk + dr,
                group,
                head_in_group,
                tile_location,
                spec.HK,
                HEADS_PER_PROGRAM,
                BLOCK_K,
                spec,
            )
            if COMPUTE_GATE_GRADIENTS:
                # G_t has a positive sign in the exponents of what token t reads, a negative one in those of what it
                # wrote.
                dgate += (dr - dk) * k.to(tl.float32)
                # Reverse cumulative sum, from each token to the chunk's end: the total minus the sum of the earlier
                # tokens.
                dgate = (tl.sum(dgate, 0) + state_product)[None, :] - (tl.cumsum(dgate, 0) - dgate)
                dgate = tl.where(gate_cumsum < MIN_LOG2_GATE_WITH_GRADIENT, 0.0, dgate)
                output_base = chunk_address(dgates, row, first_token, head, spec.T, spec.H, spec.K)
                store_token_rows(output_base, dgate, first_token, sequence_end, k_start, spec.H, spec.K, spec)
        else:
            if spec.GATE_CHANNELS == 1:
                gates_base = gates_address(gates, row, head, chunk, spec, per)
                gate_cumsum = tl.load(gates_base + rows)
                dq *= tl.exp2(gate_cumsum)[:, None]
                dscores *= pairwise_decay(gate_cumsum)
            else:
                dscores = tl.where(rows[:, None] >= rows[None, :], dscores, 0.0)
            # Kept for dk below in the operands' dtype: at 16 bits half of the registers of float32 pairs.
            dqk_scores = dscores.to(q.dtype)
            dq = add_dot(dq, dqk_scores, k, spec)
            store_or_add_to_group(
                dquery,
                dquery_group_sum,
                dq,
                group,
                head_in_group,
                tile_location,
                spec.HQ,
                HEADS_PER_PROGRAM,
                BLOCK_K,
                spec,
            )
            dgate = tl.sum(dq * q.to(tl.float32), 1)
            dscores, dr = multiply_cotangents(
                dy_base, v_new_base, states_base, first_token, sequence_end, k_start, BLOCK_K, BLOCK_V, spec
            )
            if spec.GATE_CHANNELS == 1:
                dr *= tl.exp2(gate_cumsum)[:, None]
                dscores *= pairwise_decay(gate_cumsum)
            dscores = tl.where(strictly_earlier, dscores, 0.0)
            dr = add_dot(dr, dscores.to(k.dtype), k, spec)
            # dr is -r until here; the sign changes here and where dk is stored.
            key_dot_gradient = -tl.sum(dr * k.to(tl.float32), 1)
            store_token_scalars(dbeta, key_dot_gradient, row, first_token, sequence_end, tile, NUM_K_TILES, head, spec)
            dgate += key_dot_gradient * betas
            # The gradients of the second read's scores, with beta and the sign of r, for dk as a key of that read.
            dkk_scores_with_beta = (dscores * -betas[:, None]).to(k.dtype)
            dk, state_product = state_gradient_products(
                value_operands, k_start, COMPUTE_GATE_GRADIENTS, spec.H, BLOCK_K, BLOCK_V, spec
            )
            if spec.GATE_CHANNELS == 1:
                gate_sum = tl.load(gates_base + (CHUNK - 1))
                dk *= tl.exp2(gate_sum - gate_cumsum)[:, None]
                state_product *= tl.exp2(gate_sum)
            if COMPUTE_GATE_GRADIENTS:
                # Before the chunk's own terms are added to dk: the last gate scales only what passes through dS.
                gate_sum_gradient = tl.sum(state_product, 0) + tl.sum(tl.sum(dk * k.to(tl.float32), 1), 0)
            dk = add_dot(dk, tl.trans(dqk_scores), q, spec)
            dk = add_dot(dk, tl.trans(dkk_scores_with_beta), k, spec)
            store_or_add_to_group(
                dkey,
                dkey_group_sum,
                dk - dr * betas[:, None],
                group,
                head_in_group,
                tile_location,
                spec.HK,
                HEADS_PER_PROGRAM,
                BLOCK_K,
                spec,
            )
            if COMPUTE_GATE_GRADIENTS:
                dgate -= tl.sum(dk * k.to(tl.float32), 1)
                # Reverse cumulative sum, from each token to the chunk's end: the total minus the sum of the earlier
                # tokens.
                dgate = tl.sum(dgate, 0) + gate_sum_gradient - (tl.cumsum(dgate, 0) - dgate)
                previous_gate_cumsum = tl.load(gates_base + rows - 1, mask=rows > 0, other=0.0)
                dgate = tl.where(gate_cumsum - previous_gate_cumsum < MIN_LOG2_GATE_WITH_GRADIENT, 0.0, dgate)
                store_token_scalars(dgates, dgate, row, first_token, sequence_end, tile, NUM_K_TILES, head, spec)
