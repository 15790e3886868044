"""Computes gradients of queries, of the read vectors of the low-rank term, and of the gates.

With the letters of `chunk_bwd_dka`:

    dq_i = scale (exp2(G_i) S dO_i + sum_{j <= i} w_ij (<dO_i, V_j> k_j + <dO_i, Y_j> a_j))
    db_i = exp2(G_(i - 1)) S dZ_i + sum_{j < i} w_ij (<dZ_i, V_j> k_j + <dZ_i, Y_j> a_j)
    dG_i = q_i dq_i + b_(i + 1) db_(i + 1) + (writers' terms), and at the chunk's end also the sum of exp2(G_C) S dS
"""

import triton
import triton.language as tl

from ejkernel_triton.blocks import add_dot, dot
from ejkernel_triton.linear_recurrence.chunked.kernels.chunk_bwd_dqkg import MIN_LOG2_GATE_WITH_GRADIENT
from ejkernel_triton.linear_recurrence.delta.kernels.sub_chunks import (
    multiply_by_decay,
    split_gates_high_low,
    sum_gates,
)
from ejkernel_triton.linear_recurrence.kernels.tile import (
    chunk_address,
    chunk_start_and_sequence_end,
    store_token_rows,
)
from ejkernel_triton.linear_recurrence.low_rank.kernels.chunk_bwd_dka import dscores_and_diagonal
from ejkernel_triton.linear_recurrence.low_rank.kernels.chunk_transitions import (
    load_chunk_block,
    load_chunk_gates,
    load_head_tokens,
)
from ejkernel_triton.linear_recurrence.low_rank.kernels.pair_decays import (
    SINCE_START,
    SINCE_START_BEFORE_TOKEN,
    UNTIL_END,
    gates_are_weak,
    reader_decay,
    step_pair_mask,
    writer_decay,
)
from ejkernel_triton.linear_recurrence.low_rank.kernels.transition_scan import load_nearest_chunk_sums


@triton.jit
def add_reader_step(
    gradient,
    dscores,
    vectors,
    gates,
    step,
    ARE_WEAK: tl.constexpr,
    IS_BEFORE_DECAY: tl.constexpr,
    spec: tl.constexpr,
):
    """Adds the gradients of a step's pairs to those of readers; see `add_reader_gradients`."""
    key_dscores, write_dscores = dscores
    k, a = vectors
    decay, mask = writer_decay(step, gates, ARE_WEAK, spec), step_pair_mask(step, ARE_WEAK, spec)
    acc = dot(tl.where(mask, key_dscores, 0.0).to(k.dtype), multiply_by_decay(k, decay), spec)
    acc = add_dot(acc, tl.where(mask, write_dscores, 0.0).to(k.dtype), multiply_by_decay(a, decay), spec)
    return gradient + reader_decay(step, gates, ARE_WEAK, IS_BEFORE_DECAY, spec) * acc


@triton.jit
def add_reader_gradients(
    gradient, dscores, vectors, gates, are_weak, IS_BEFORE_DECAY: tl.constexpr, spec: tl.constexpr
):
    """Adds the pairs' gradients to those of readers, without the terms of a token with itself.

    Args:
        gradient: [CHUNK_SIZE, COLUMNS] float32.
        dscores: Gradients of the products of readers and keys, and of readers and write vectors, [CHUNK_SIZE,
            CHUNK_SIZE] both.
        vectors: Keys and write vectors, [CHUNK_SIZE, COLUMNS] both.
        gates: As in `pair_scores`.
        are_weak: As in `pair_scores`.
        IS_BEFORE_DECAY: As in `pair_scores`.
        spec: Constants.
    """
    LEVELS: tl.constexpr = spec.LOG2_CHUNK - spec.LOG2_SUB_CHUNK
    if are_weak:
        gradient = add_reader_step(gradient, dscores, vectors, gates, 0, True, IS_BEFORE_DECAY, spec)
    else:
        for step in tl.range(0, LEVELS + 1, num_stages=1, disable_licm=True):
            gradient = add_reader_step(gradient, dscores, vectors, gates, step, False, IS_BEFORE_DECAY, spec)
    return gradient


@triton.jit
def chunk_bwd_dqb_kernel(
    query,
    key,
    value,
    decay,
    write_vectors,
    read_vectors,
    gate_sum_matrices,
    reads,
    dreads,
    states,
    dstates,
    cotangent,
    writer_dgates,
    chunk_dgates,
    chunk_starts,
    sequence_ends,
    dquery,
    dread_vectors,
    ddecay,
    spec: tl.constexpr,
    per: tl.constexpr,
    DECAY_TOKENS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Computes the gradients of queries, read vectors and gates of one chunk of one head; see
    `backward.reader_gradients`.
    """
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
    log2_chunk_decay = tl.sum(log2_gates, 0)
    # A token's own key and write vector have no decay: their terms are added in float32 after the gradient of the
    # gates, in which they cancel.
    do = load_head_tokens(cotangent, row // per.COTANGENT, location, spec.H, spec.V, BLOCK_V, DTYPE, spec)
    v = load_head_tokens(value, row // per.VALUE, location, spec.HV, spec.V, BLOCK_V, DTYPE, spec)
    y = load_chunk_block(reads, row // per.READS, head, chunk, CHUNK, BLOCK_V, DTYPE, spec)
    key_dscores, diagonal_key_dscores = dscores_and_diagonal(do, v, spec.OUTPUT_SCALE, spec)
    write_dscores, diagonal_write_dscores = dscores_and_diagonal(do, y, spec.OUTPUT_SCALE, spec)
    decay_since = tl.exp2(sum_gates(gate_sum_matrices, SINCE_START, gates_high, gates_low, spec))
    state = load_chunk_block(states, row // per.STATES, head, chunk, BLOCK_K, BLOCK_V, DTYPE, spec)
    dq = dot(do, tl.trans(state), spec) * (decay_since * spec.OUTPUT_SCALE)
    k = load_head_tokens(key, row // per.KEY, location, spec.HK, spec.K, BLOCK_K, DTYPE, spec)
    a = load_head_tokens(write_vectors, row // per.WRITE_VECTORS, location, spec.H, spec.K, BLOCK_K, DTYPE, spec)
    dq = add_reader_gradients(dq, (key_dscores, write_dscores), (k, a), gates, are_weak, False, spec)
    q = load_head_tokens(query, row // per.QUERY, location, spec.HQ, spec.K, BLOCK_K, DTYPE, spec)
    dgates = (
        load_chunk_block(writer_dgates, row // per.WRITER_DGATES, head, chunk, CHUNK, BLOCK_K, tl.float32, spec)
        + q.to(tl.float32) * dq
    )
    dq += diagonal_key_dscores[:, None] * k.to(tl.float32) + diagonal_write_dscores[:, None] * a.to(tl.float32)
    at = chunk_address(dquery, row, first_token, head, spec.T, spec.H, spec.K)
    store_token_rows(at, dq, first_token, sequence_end, 0, spec.H, spec.K, spec)

    # Read vectors. All tiles are loaded again after the store, from the cache: together they would not fit the
    # registers.
    log2_gates = load_chunk_gates(decay, row // per.DECAY, location, DECAY_TOKENS, BLOCK_K, spec)
    gates_high, gates_low = split_gates_high_low(log2_gates, DTYPE)
    gates = (gate_sum_matrices, gates_high, gates_low)
    dz = load_chunk_block(dreads, row // per.DREADS, head, chunk, CHUNK, BLOCK_V, DTYPE, spec)
    v = load_head_tokens(value, row // per.VALUE, location, spec.HV, spec.V, BLOCK_V, DTYPE, spec)
    y = load_chunk_block(reads, row // per.READS, head, chunk, CHUNK, BLOCK_V, DTYPE, spec)
    key_dscores = dot(dz, tl.trans(v), spec).to(DTYPE)
    write_dscores = dot(dz, tl.trans(y), spec).to(DTYPE)
    decay_since = tl.exp2(sum_gates(gate_sum_matrices, SINCE_START_BEFORE_TOKEN, gates_high, gates_low, spec))
    state = load_chunk_block(states, row // per.STATES, head, chunk, BLOCK_K, BLOCK_V, DTYPE, spec)
    dstate = load_chunk_block(dstates, row // per.DSTATES, head, chunk, BLOCK_K, BLOCK_V, DTYPE, spec)
    db = dot(dz, tl.trans(state), spec) * decay_since
    chunk_dgate = tl.sum(state.to(tl.float32) * dstate.to(tl.float32), 1) * tl.exp2(log2_chunk_decay)
    chunk_dgate += load_nearest_chunk_sums(chunk_dgates, row // per.CHUNK_DGATES, head, chunk, BLOCK_K, spec)
    k = load_head_tokens(key, row // per.KEY, location, spec.HK, spec.K, BLOCK_K, DTYPE, spec)
    a = load_head_tokens(write_vectors, row // per.WRITE_VECTORS, location, spec.H, spec.K, BLOCK_K, DTYPE, spec)
    db = add_reader_gradients(db, (key_dscores, write_dscores), (k, a), gates, are_weak, True, spec)
    at = chunk_address(dread_vectors, row, first_token, head, spec.T, spec.H, spec.K)
    store_token_rows(at, db, first_token, sequence_end, 0, spec.H, spec.K, spec)

    # A gate is a term of the cumulative gates of its token and later ones, which the read vectors of later tokens use.
    b = load_head_tokens(read_vectors, row // per.READ_VECTORS, location, spec.H, spec.K, BLOCK_K, DTYPE, spec)
    later_high, later_low = split_gates_high_low(dgates + b.to(tl.float32) * db, DTYPE)
    dgates += sum_gates(gate_sum_matrices, UNTIL_END, later_high, later_low, spec) + chunk_dgate[None, :]
    log2_gates = load_chunk_gates(decay, row // per.DECAY, location, DECAY_TOKENS, BLOCK_K, spec)
    dgates = tl.where(log2_gates < MIN_LOG2_GATE_WITH_GRADIENT, 0.0, dgates)
    at = chunk_address(ddecay, row, first_token, head, spec.T, spec.H, spec.K)
    store_token_rows(at, dgates, first_token, sequence_end, 0, spec.H, spec.K, spec)
