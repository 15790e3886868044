"""Computes gradients of values and of the low-rank reads, and recomputes these reads.

With the letters of `chunk_transitions`, Z = B' S + L V the reads before T adds those of the chunk's earlier write
vectors, and dS the gradient of the state after the chunk:

    Y  = T Z
    dY = scale Aqa^T dO + A' dS
    dZ = T^T dY
    dV = scale Aqk^T dO + K' dS + L^T dZ
"""

import triton
import triton.language as tl

from ejkernel_triton.blocks import add_dot, dot
from ejkernel_triton.linear_recurrence.delta.kernels.sub_chunks import (
    multiply_by_decay,
    split_gates_high_low,
    sum_gates,
)
from ejkernel_triton.linear_recurrence.kernels.tile import (
    chunk_address,
    chunk_start_and_sequence_end,
    score_pointers,
    store_token_rows,
)
from ejkernel_triton.linear_recurrence.low_rank.kernels.chunk_transitions import (
    chunk_block_pointers,
    load_chunk_block,
    load_chunk_gates,
    load_head_tokens,
)
from ejkernel_triton.linear_recurrence.low_rank.kernels.pair_decays import (
    SINCE_START_BEFORE_TOKEN,
    UNTIL_END,
    gates_are_weak,
    pair_scores,
)


@triton.jit
def chunk_bwd_dvy_kernel(
    query,
    key,
    value,
    decay,
    write_vectors,
    read_vectors,
    gate_sum_matrices,
    inverse,
    states,
    dstates,
    cotangent,
    chunk_starts,
    sequence_ends,
    dvalue,
    reads,
    dreads,
    spec: tl.constexpr,
    per: tl.constexpr,
    DECAY_TOKENS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Computes one chunk of one head; see `backward.value_and_read_gradients`."""
    CHUNK: tl.constexpr = spec.CHUNK_SIZE
    DTYPE: tl.constexpr = query.dtype.element_ty
    program = tl.program_id(0)
    head = program % spec.H
    program = program // spec.H
    chunk = program % spec.NUM_CHUNKS
    row = program // spec.NUM_CHUNKS
    first_token, sequence_end = chunk_start_and_sequence_end(chunk_starts, sequence_ends, row, chunk, spec, per)
    location = (head, first_token, sequence_end)
    log2_gates = load_chunk_gates(decay, row // per.DECAY, location, DECAY_TOKENS, BLOCK_K, spec)
    gates_high, gates_low = split_gates_high_low(log2_gates, DTYPE)
    gates = (gate_sum_matrices, gates_high, gates_low)
    are_weak = gates_are_weak(gate_sum_matrices, gates_high, gates_low, spec)
    k = load_head_tokens(key, row // per.KEY, location, spec.HK, spec.K, BLOCK_K, DTYPE, spec)
    a = load_head_tokens(write_vectors, row // per.WRITE_VECTORS, location, spec.H, spec.K, BLOCK_K, DTYPE, spec)
    q = load_head_tokens(query, row // per.QUERY, location, spec.HQ, spec.K, BLOCK_K, DTYPE, spec)
    key_scores, write_scores = pair_scores(q, k, a, gates, are_weak, False, spec)
    do = load_head_tokens(cotangent, row // per.COTANGENT, location, spec.H, spec.V, BLOCK_V, DTYPE, spec)
    # Scores are scaled in float32, so that 16-bit cotangents keep their digits.
    dv = dot(tl.trans((key_scores * spec.OUTPUT_SCALE).to(DTYPE)), do, spec)
    dy = dot(tl.trans((write_scores * spec.OUTPUT_SCALE).to(DTYPE)), do, spec)
    dstate = load_chunk_block(dstates, row // per.DSTATES, head, chunk, BLOCK_K, BLOCK_V, DTYPE, spec)
    decay_until = tl.exp2(sum_gates(gate_sum_matrices, UNTIL_END, gates_high, gates_low, spec))
    dv = add_dot(dv, multiply_by_decay(k, decay_until), dstate, spec)
    dy = add_dot(dy, multiply_by_decay(a, decay_until), dstate, spec)
    b = load_head_tokens(read_vectors, row // per.READ_VECTORS, location, spec.H, spec.K, BLOCK_K, DTYPE, spec)
    v = load_head_tokens(value, row // per.VALUE, location, spec.HV, spec.V, BLOCK_V, DTYPE, spec)
    key_scores, _ = pair_scores(b, k, a, gates, are_weak, True, spec)
    key_operand = key_scores.to(DTYPE)
    inverse_tile = tl.load(score_pointers(inverse, row // per.INVERSE, head, chunk, spec))
    dz = dot(tl.trans(inverse_tile), dy.to(DTYPE), spec).to(DTYPE)
    at = chunk_block_pointers(dreads, row, head, chunk, 0, CHUNK, BLOCK_V, BLOCK_V, spec)
    tl.store(at, dz)
    dv = add_dot(dv, tl.trans(key_operand), dz, spec)
    at = chunk_address(dvalue, row, first_token, head, spec.T, spec.H, spec.V)
    store_token_rows(at, dv, first_token, sequence_end, 0, spec.H, spec.V, spec)
    state = load_chunk_block(states, row // per.STATES, head, chunk, BLOCK_K, BLOCK_V, DTYPE, spec)
    decay_since = tl.exp2(sum_gates(gate_sum_matrices, SINCE_START_BEFORE_TOKEN, gates_high, gates_low, spec))
    z = add_dot(dot(key_operand, v, spec), multiply_by_decay(b, decay_since), state, spec)
    at = chunk_block_pointers(reads, row, head, chunk, 0, CHUNK, BLOCK_V, BLOCK_V, spec)
    tl.store(at, dot(inverse_tile, z.to(DTYPE), spec).to(DTYPE))
