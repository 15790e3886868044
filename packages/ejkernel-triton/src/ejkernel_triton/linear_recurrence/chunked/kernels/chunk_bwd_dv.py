"""Computes gradients of all chunks in parallel, each from the state S_0 before it and the gradient dS of the state
after it.

With A_ij = w_ij <q_i, k_j>, w_ij = exp2(G_i - G_j) for j <= i, dP_ij = scale <do_i, v_j>, and T the chunk's last token:

    dv_j = scale sum_i A_ij do_i + (k_j exp2(G_T - G_j)) dS
    dq_i = scale exp2(G_i) S_0 do_i + sum_j w_ij dP_ij k_j
    dk_j = sum_i w_ij dP_ij q_i + exp2(G_T - G_j) dS v_j
    dG_t = q_t dq_t - k_t dk_t, and for t = T: <dS, exp2(G_T) S_0> + sum_j <k_j, the term of dk_j with dS>
    dg_t = sum_{i >= t} dG_i

where v_j stands for dt_j v_j: its gradient times v_j is that of dt_j. The sum over i stays inside the chunk: the effect
of a gate on later chunks is in dS.

    chunk_bwd_dv_kernel      a program: one chunk, BLOCK_V value channels; loops over heads that share values
    chunk_bwd_dqkg_kernel    a program: one chunk, BLOCK_K key channels; loops over heads that share queries or keys

There are no atomics: programs that share a gradient store partial sums, which are added in a fixed order, so results
are reproducible bit for bit.
"""

import triton
import triton.language as tl

from ejkernel_triton.blocks import add_dot
from ejkernel_triton.linear_recurrence.kernels.tile import (
    chunk_address,
    chunk_start_and_sequence_end,
    decay_to_chunk_end,
    gates_address,
    load_channel_gate_cumsum,
    load_channel_gate_sum,
    load_constant_gate,
    load_head_gate_cumsum,
    load_head_gate_sum,
    load_state,
    load_token_rows,
    load_token_scalars,
    score_pointers,
    state_address,
    store_token_rows,
)


@triton.jit
def store_token_scalars(
    base,
    scalars,
    row,
    first_token,
    sequence_end,
    partial_sum_index,
    NUM_PARTIAL_SUMS: tl.constexpr,
    head,
    spec: tl.constexpr,
):
    """Stores [CHUNK_SIZE] elements of a head to [rows, NUM_PARTIAL_SUMS, T, H]."""
    rows = tl.arange(0, spec.CHUNK_SIZE)
    at = base + ((tl.cast(row, tl.int64) * NUM_PARTIAL_SUMS + partial_sum_index) * spec.T + first_token) * spec.H + head
    tl.store(at + rows * spec.H, scalars.to(base.dtype.element_ty), mask=first_token + rows < sequence_end)


@triton.jit
def chunk_bwd_dv_kernel(
    query,
    key,
    value,
    gates,
    scores,
    dt,
    skip,
    cotangent,
    dstates,
    chunk_starts,
    sequence_ends,
    dvalue,
    ddt,
    dskip,
    spec: tl.constexpr,
    per: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HEADS_PER_PROGRAM: tl.constexpr,
):
    """Computes the gradients of one chunk's values, dt and skip; see `backward.value_gradients`."""
    NUM_V_TILES: tl.constexpr = (spec.V + BLOCK_V - 1) // BLOCK_V
    CHUNK: tl.constexpr = spec.CHUNK_SIZE
    NUM_GROUPS: tl.constexpr = spec.H // HEADS_PER_PROGRAM
    program = tl.program_id(0)
    tile = program % NUM_V_TILES
    v_start = tile * BLOCK_V
    program = program // NUM_V_TILES
    group = program % NUM_GROUPS
    program = program // NUM_GROUPS
    chunk = program % spec.NUM_CHUNKS
    row = program // spec.NUM_CHUNKS
    first_token, sequence_end = chunk_start_and_sequence_end(chunk_starts, sequence_ends, row, chunk, spec, per)
    rows = tl.arange(0, CHUNK)
    # Heads that share a value are added up here, one after the other, in a fixed order and without atomics.
    dv_sum = tl.zeros([CHUNK, BLOCK_V], tl.float32)
    for head_in_group in tl.range(0, HEADS_PER_PROGRAM):
        head = group * HEADS_PER_PROGRAM + head_in_group
        query_base = chunk_address(
            query, row // per.QUERY, first_token, head // (spec.H // spec.HQ), spec.T, spec.HQ, spec.K
        )
        key_base = chunk_address(key, row // per.KEY, first_token, head // (spec.H // spec.HK), spec.T, spec.HK, spec.K)
        states_base = state_address(dstates, row, head, chunk, spec)
        gates_base = gates_address(gates, row, head, chunk, spec, per)
        dv = tl.zeros([CHUNK, BLOCK_V], tl.float32)
        transposed_scores = tl.zeros([CHUNK, CHUNK], tl.float32)  # by (key, query)
        for k_start in tl.range(0, spec.K, BLOCK_K):
            k = load_token_rows(key_base, first_token, sequence_end, k_start, spec.HK, spec.K, BLOCK_K, spec)
            s = load_state(states_base, k_start, v_start, BLOCK_K, BLOCK_V, spec)
            if spec.GATE_CHANNELS > 1:
                gate_cumsum = load_channel_gate_cumsum(gates_base, k_start, BLOCK_K, spec)
                # Decay from a token to the chunk's end, at most 1.
                decay_until = tl.exp2(load_channel_gate_sum(gates_base, k_start, BLOCK_K, spec)[None, :] - gate_cumsum)
                dv = add_dot(dv, (k.to(tl.float32) * decay_until).to(s.dtype), s, spec)
            else:
                q = load_token_rows(query_base, first_token, sequence_end, k_start, spec.HQ, spec.K, BLOCK_K, spec)
                # By (key, query), so that it is a left operand below without a transposition in registers.
                transposed_scores = add_dot(transposed_scores, k, tl.trans(q), spec)
                dv = add_dot(dv, k.to(s.dtype), s, spec)
        if spec.GATE_CHANNELS > 1:
            # Scores from the forward pass are by (query, key), and 0 above the diagonal.
            transposed_scores = tl.trans(tl.load(score_pointers(scores, row, head, chunk, spec))).to(tl.float32)
        if spec.GATE_CHANNELS == 1:
            constant_log2_gate = load_constant_gate(gates, row, head, spec, per)
            gate_cumsum = load_head_gate_cumsum(gates_base, constant_log2_gate, 0, CHUNK, spec)
            dv *= decay_to_chunk_end(
                load_head_gate_sum(gates_base, constant_log2_gate, sequence_end - first_token, spec), gate_cumsum, spec
            )[:, None]
            # Masked before exp2, as in `pairwise_decay`: earlier queries would overflow.
            log2_decay = tl.where(
                rows[None, :] >= rows[:, None], gate_cumsum[None, :] - gate_cumsum[:, None], float("-inf")
            )
            transposed_scores *= tl.exp2(log2_decay)
        if spec.GATE_CHANNELS == 0:
            transposed_scores = tl.where(rows[None, :] >= rows[:, None], transposed_scores, 0.0)
        do_base = chunk_address(cotangent, row // per.COTANGENT, first_token, head, spec.T, spec.H, spec.V)
        do = load_token_rows(do_base, first_token, sequence_end, v_start, spec.H, spec.V, BLOCK_V, spec)
        # Masked pairs are 0 in `transposed_scores`; cotangents past the end are 0 too, so rows past the end give no 0 x
        # NaN.
        dv = add_dot(dv, (transposed_scores * spec.OUTPUT_SCALE).to(do.dtype), do, spec)
        if spec.HAS_DT or spec.HAS_SKIP:
            v_head = head // (spec.H // VALUE_HEADS)
            value_base = chunk_address(value, row // per.VALUE, first_token, v_head, spec.T, VALUE_HEADS, spec.V)
            v = load_token_rows(value_base, first_token, sequence_end, v_start, VALUE_HEADS, spec.V, BLOCK_V, spec).to(
                tl.float32
            )
            if spec.HAS_DT:
                # Here dv is the gradient of dt v: its product with v is the gradient of dt, that with dt the gradient
                # of v. The sum is over this tile's channels; XLA adds up the tiles.
                store_token_scalars(
                    ddt, tl.sum(dv * v, 1), row, first_token, sequence_end, tile, NUM_V_TILES, head, spec
                )
                dv *= load_token_scalars(dt, row // per.DT, first_token, sequence_end, head, spec)[:, None]
            if spec.HAS_SKIP:
                store_token_scalars(
                    dskip,
                    tl.sum(do.to(tl.float32) * v, 1),
                    row,
                    first_token,
                    sequence_end,
                    tile,
                    NUM_V_TILES,
                    head,
                    spec,
                )
                dv += do.to(tl.float32) * tl.load(skip + (row // per.SKIP) * spec.H + head).to(tl.float32)
        dv_sum += dv
    at = chunk_address(dvalue, row, first_token, group, spec.T, NUM_GROUPS, spec.V)
    store_token_rows(at, dv_sum, first_token, sequence_end, v_start, NUM_GROUPS, spec.V, spec)
