"""Computes outputs of all chunks in parallel, each from the state before it and its own tokens.

o_i = scale (q_i exp2(G_i) S_0 + sum_{j <= i} (q_i exp2(G_i - G_j) k_j) dt_j v_j) + skip v_i

    key channels    |  tile 0  |  tile 1  |          a program: one head, one chunk, BLOCK_V value channels
    q, S_0       -> acc += q S_0                     in the loop over key channels
    q, k         -> pairs += q k^T
    gates        -> acc *= exp2(G_i), pairs *= exp2(G_i - G_j)
    pairs, v     -> acc += pairs v                   after it, for the diagonal block of tokens
    q, k', v'    -> acc += pairs' v'                 for every earlier block of the chunk, where it has several

With gates per key channel the decay differs along the contracted axis: q is multiplied by exp2(G_i) in the loop, and an
earlier kernel computes the pairs, once for all tiles of values.
"""

import triton
import triton.language as tl

from ejkernel_triton.blocks import add_dot
from ejkernel_triton.linear_recurrence.kernels.tile import (
    chunk_address,
    chunk_start_and_sequence_end,
    gates_address,
    load_channel_gate_cumsum,
    load_constant_gate,
    load_head_gate_cumsum,
    load_state,
    load_token_rows,
    load_token_scalars,
    pairwise_decay,
    score_pointers,
    state_address,
    store_token_rows,
)


@triton.jit
def chunk_fwd_o_kernel(
    query,
    key,
    value,
    gates,
    scores,
    dt,
    skip,
    states,
    chunk_starts,
    sequence_ends,
    output,
    spec: tl.constexpr,
    per: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Computes outputs of BLOCK_T tokens of one head's chunk and BLOCK_V value channels; see
    `forward.chunk_outputs`.
    """
    NUM_V_TILES: tl.constexpr = (spec.V + BLOCK_V - 1) // BLOCK_V
    BLOCKS_PER_CHUNK: tl.constexpr = spec.CHUNK_SIZE // BLOCK_T
    program = tl.program_id(0)
    v_start = (program % NUM_V_TILES) * BLOCK_V
    program = program // NUM_V_TILES
    # Blocks of a chunk and its heads have consecutive programs, which share their inputs in L2.
    block = program % BLOCKS_PER_CHUNK
    program = program // BLOCKS_PER_CHUNK
    head = program % spec.H
    program = program // spec.H
    chunk = program % spec.NUM_CHUNKS
    row = program // spec.NUM_CHUNKS
    chunk_start, sequence_end = chunk_start_and_sequence_end(chunk_starts, sequence_ends, row, chunk, spec, per)
    first_token = chunk_start + block * BLOCK_T
    rows = tl.arange(0, BLOCK_T)
    query_base = chunk_address(
        query, row // per.QUERY, first_token, head // (spec.H // spec.HQ), spec.T, spec.HQ, spec.K
    )
    key_base = chunk_address(key, row // per.KEY, first_token, head // (spec.H // spec.HK), spec.T, spec.HK, spec.K)
    v_head = head // (spec.H // VALUE_HEADS)
    value_base = chunk_address(value, row // per.VALUE, first_token, v_head, spec.T, VALUE_HEADS, spec.V)
    states_base = state_address(states, row, head, chunk, spec)
    gates_base = gates_address(gates, row, head, chunk, spec, per)
    acc = tl.zeros([BLOCK_T, BLOCK_V], tl.float32)
    scores_tile = tl.zeros([BLOCK_T, BLOCK_T], tl.float32)
    # The product with the state, and the products of the diagonal block: both read q, so they share the loop.
    for k_start in tl.range(0, spec.K, BLOCK_K):
        q = load_token_rows(query_base, first_token, sequence_end, k_start, spec.HQ, spec.K, BLOCK_K, spec, BLOCK_T)
        s = load_state(states_base, k_start, v_start, BLOCK_K, BLOCK_V, spec)
        if spec.QK_ARE_DECAYED:
            acc = add_dot(acc, q.to(s.dtype), s, spec)
        elif spec.GATE_CHANNELS > 1:
            acc = add_dot(
                acc,
                (q.to(tl.float32) * tl.exp2(load_channel_gate_cumsum(gates_base, k_start, BLOCK_K, spec))).to(s.dtype),
                s,
                spec,
            )
        else:
            k = load_token_rows(key_base, first_token, sequence_end, k_start, spec.HK, spec.K, BLOCK_K, spec, BLOCK_T)
            scores_tile = add_dot(scores_tile, q, tl.trans(k), spec)
            acc = add_dot(acc, q.to(s.dtype), s, spec)
    gate_cumsum = 0.0
    if spec.GATE_CHANNELS > 1:
        # Scores are 0 above the diagonal.
        scores_tile = tl.load(score_pointers(scores, row, head, chunk, spec))
    if spec.GATE_CHANNELS == 1:
        # A gate per head is a factor of rows: once on the accumulator, instead of on every tile of q.
        constant_log2_gate = load_constant_gate(gates, row, head, spec, per)
        gate_cumsum = load_head_gate_cumsum(gates_base, constant_log2_gate, block * BLOCK_T, BLOCK_T, spec)
        acc *= tl.exp2(gate_cumsum)[:, None]
        # Also masks: the weights are 0 above the diagonal.
        scores_tile *= pairwise_decay(gate_cumsum)
    if spec.GATE_CHANNELS == 0:
        scores_tile = tl.where(rows[:, None] >= rows[None, :], scores_tile, 0.0)
    if spec.HAS_DT:
        scores_tile = (
            scores_tile.to(tl.float32)
            * load_token_scalars(dt, row // per.DT, first_token, sequence_end, head, spec, BLOCK_T)[None, :]
        )
    # Tokens past the end have keys and values of 0, so they add nothing; their outputs are not stored.
    v = load_token_rows(value_base, first_token, sequence_end, v_start, VALUE_HEADS, spec.V, BLOCK_V, spec, BLOCK_T)
    acc = add_dot(acc, scores_tile.to(v.dtype), v, spec)
    if BLOCKS_PER_CHUNK > 1:
        # Blocks of 64 tokens in chunks of 128 move half as many states, 0.356 ms instead of 0.382
        # (docs/lab/linear_recurrence_gpu.md), while a tile has the rows of one warpgroup.
        for earlier_block in tl.range(0, block):
            # All pairs count here. q is reloaded from L1 or L2: kept through the loop it would take registers.
            token_distance = (block - earlier_block) * BLOCK_T
            k_earlier = key_base - token_distance * (spec.HK * spec.K)
            scores_tile = tl.zeros([BLOCK_T, BLOCK_T], tl.float32)
            for k_start in tl.range(0, spec.K, BLOCK_K):
                q = load_token_rows(
                    query_base, first_token, sequence_end, k_start, spec.HQ, spec.K, BLOCK_K, spec, BLOCK_T
                )
                k = load_token_rows(
                    k_earlier,
                    first_token - token_distance,
                    sequence_end,
                    k_start,
                    spec.HK,
                    spec.K,
                    BLOCK_K,
                    spec,
                    BLOCK_T,
                )
                scores_tile = add_dot(scores_tile, q, tl.trans(k), spec)
            if spec.GATE_CHANNELS == 1:
                # No mask before exp2: sums of earlier tokens are larger, so every exponent is at most 0.
                earlier_gate_cumsum = load_head_gate_cumsum(
                    gates_base, constant_log2_gate, earlier_block * BLOCK_T, BLOCK_T, spec
                )
                scores_tile *= tl.exp2(gate_cumsum[:, None] - earlier_gate_cumsum[None, :])
            if spec.HAS_DT:
                scores_tile *= load_token_scalars(
                    dt, row // per.DT, first_token - token_distance, sequence_end, head, spec, BLOCK_T
                )[None, :]
            v_earlier = load_token_rows(
                value_base - token_distance * (VALUE_HEADS * spec.V),
                first_token - token_distance,
                sequence_end,
                v_start,
                VALUE_HEADS,
                spec.V,
                BLOCK_V,
                spec,
                BLOCK_T,
            )
            acc = add_dot(acc, scores_tile.to(v_earlier.dtype), v_earlier, spec)
    # The output is scaled; the skip is not.
    acc *= spec.OUTPUT_SCALE
    if spec.HAS_SKIP:
        acc += v.to(tl.float32) * tl.load(skip + (row // per.SKIP) * spec.H + head).to(tl.float32)
    store_token_rows(
        chunk_address(output, row, first_token, head, spec.T, spec.H, spec.V),
        acc,
        first_token,
        sequence_end,
        v_start,
        spec.H,
        spec.V,
        spec,
    )
