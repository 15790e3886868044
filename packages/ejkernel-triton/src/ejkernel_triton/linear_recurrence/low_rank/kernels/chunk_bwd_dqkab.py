"""Computes gradients of queries, keys, gates and the vectors of the low-rank term.

Readers are the queries, with the cotangent scale dO, and the read vectors, with dZ; writers are the keys, with the
values V, and the write vectors, with the reads Y (letters as in `chunk_bwd_dvy`). With w_ij the decay of a pair:

    dq_i = scale (exp2(G_i) S dO_i + sum_{j <= i} w_ij (<dO_i, V_j> k_j + <dO_i, Y_j> a_j))
    db_i = exp2(G_(i - 1)) S dZ_i + sum_{j < i} w_ij (<dZ_i, V_j> k_j + <dZ_i, Y_j> a_j)
    dk_j = exp2(G_C - G_j) dS V_j + sum_{i >= j} w_ij scale <dO_i, V_j> q_i + sum_{i > j} w_ij <dZ_i, V_j> b_i
    da_j = the same with Y_j in place of V_j
    dG_i = q_i dq_i - k_i dk_i - a_i da_i + b_(i + 1) db_(i + 1), and at the chunk's end the sum of k dk + a da of the
           terms with dS, and of exp2(G_C) S dS

Each of the four is stored before the next, as registers allow.
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


@triton.jit
def dscores_and_diagonal(cotangents, written, SCALE: tl.constexpr, spec: tl.constexpr):
    """Returns the gradients of scores, <c_i, x_j> SCALE of cotangents c and values or reads x, [CHUNK_SIZE, CHUNK_SIZE]
    in the cotangents' dtype; and those of each token with itself, [CHUNK_SIZE] float32.
    """
    dscores = dot(cotangents, tl.trans(written), spec) * SCALE
    rows = tl.arange(0, spec.CHUNK_SIZE)
    diagonal = tl.sum(tl.where(rows[:, None] == rows[None, :], dscores, 0.0), 1)
    return dscores.to(cotangents.dtype), diagonal


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
def add_writer_step(gradient, dscores, vectors, gates, step, ARE_WEAK: tl.constexpr, spec: tl.constexpr):
    """Adds the gradients of a step's pairs to those of writers; see `add_writer_gradients`."""
    query_dscores, read_dscores = dscores
    q, b = vectors
    mask = step_pair_mask(step, ARE_WEAK, spec)
    decayed = multiply_by_decay(q, reader_decay(step, gates, ARE_WEAK, False, spec))
    acc = dot(tl.trans(tl.where(mask, query_dscores, 0.0).to(q.dtype)), decayed, spec)
    decayed = multiply_by_decay(b, reader_decay(step, gates, ARE_WEAK, True, spec))
    acc = add_dot(acc, tl.trans(tl.where(mask, read_dscores, 0.0).to(q.dtype)), decayed, spec)
    return gradient + writer_decay(step, gates, ARE_WEAK, spec) * acc


@triton.jit
def add_writer_gradients(gradient, dscores, vectors, gates, are_weak, spec: tl.constexpr):
    """Adds the pairs' gradients to those of writers, without the terms of a token with itself.

    Args:
        gradient: [CHUNK_SIZE, COLUMNS] float32.
        dscores: Gradients of the products of queries and writers, and of read vectors and writers, [CHUNK_SIZE,
            CHUNK_SIZE] both, by (reader, writer).
        vectors: Queries and read vectors, [CHUNK_SIZE, COLUMNS] both.
        gates: As in `pair_scores`.
        are_weak: As in `pair_scores`.
        spec: Constants.
    """
    LEVELS: tl.constexpr = spec.LOG2_CHUNK - spec.LOG2_SUB_CHUNK
    if are_weak:
        gradient = add_writer_step(gradient, dscores, vectors, gates, 0, True, spec)
    else:
        for step in tl.range(0, LEVELS + 1, num_stages=1, disable_licm=True):
            gradient = add_writer_step(gradient, dscores, vectors, gates, step, False, spec)
    return gradient


@triton.jit
def chunk_bwd_dqkab_kernel(
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
    chunk_starts,
    sequence_ends,
    dquery,
    dkey,
    dwrite_vectors,
    dread_vectors,
    ddecay,
    spec: tl.constexpr,
    per: tl.constexpr,
    DECAY_TOKENS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Computes all of one head's chunk; see `backward.vector_gradients`."""
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
    dquery_at = chunk_address(dquery, row, first_token, head, spec.T, spec.H, spec.K)
    dkey_at = chunk_address(dkey, row, first_token, head, spec.T, spec.H, spec.K)
    dwrite_at = chunk_address(dwrite_vectors, row, first_token, head, spec.T, spec.H, spec.K)
    dread_at = chunk_address(dread_vectors, row, first_token, head, spec.T, spec.H, spec.K)
    ddecay_at = chunk_address(ddecay, row, first_token, head, spec.T, spec.H, spec.K)

    # Queries. A token's own key and write vector have no decay: their terms are added in float32 after the gradient of
    # the gates, in which they cancel.
    do = load_head_tokens(cotangent, row // per.COTANGENT, location, spec.H, spec.V, BLOCK_V, DTYPE, spec)
    v = load_head_tokens(value, row // per.VALUE, location, spec.HV, spec.V, BLOCK_V, DTYPE, spec)
    key_dscores, own_key_dscores = dscores_and_diagonal(do, v, spec.OUTPUT_SCALE, spec)
    write_dscores, own_write_dscores = dscores_and_diagonal(
        do, load_chunk_block(reads, row // per.READS, head, chunk, CHUNK, BLOCK_V, DTYPE, spec), spec.OUTPUT_SCALE, spec
    )
    decay_since = tl.exp2(sum_gates(gate_sum_matrices, SINCE_START, gates_high, gates_low, spec))
    dq = dot(
        do, tl.trans(load_chunk_block(states, row // per.STATES, head, chunk, BLOCK_K, BLOCK_V, DTYPE, spec)), spec
    ) * (decay_since * spec.OUTPUT_SCALE)
    k = load_head_tokens(key, row // per.KEY, location, spec.HK, spec.K, BLOCK_K, DTYPE, spec)
    a = load_head_tokens(write_vectors, row // per.WRITE_VECTORS, location, spec.H, spec.K, BLOCK_K, DTYPE, spec)
    dq = add_reader_gradients(dq, (key_dscores, write_dscores), (k, a), gates, are_weak, False, spec)
    q = load_head_tokens(query, row // per.QUERY, location, spec.HQ, spec.K, BLOCK_K, DTYPE, spec)
    dgates = q.to(tl.float32) * dq
    dq += own_key_dscores[:, None] * k.to(tl.float32) + own_write_dscores[:, None] * a.to(tl.float32)
    store_token_rows(dquery_at, dq, first_token, sequence_end, 0, spec.H, spec.K, spec)

    # Keys. All tiles are loaded again after each store, from the cache: together they would not fit the registers.
    log2_gates = load_chunk_gates(decay, row // per.DECAY, location, DECAY_TOKENS, BLOCK_K, spec)
    gates_high, gates_low = split_gates_high_low(log2_gates, DTYPE)
    gates = (gate_sum_matrices, gates_high, gates_low)
    do = load_head_tokens(cotangent, row // per.COTANGENT, location, spec.H, spec.V, BLOCK_V, DTYPE, spec)
    v = load_head_tokens(value, row // per.VALUE, location, spec.HV, spec.V, BLOCK_V, DTYPE, spec)
    query_dscores, _ = dscores_and_diagonal(do, v, spec.OUTPUT_SCALE, spec)
    read_dscores = dot(
        load_chunk_block(dreads, row // per.DREADS, head, chunk, CHUNK, BLOCK_V, DTYPE, spec), tl.trans(v), spec
    ).to(DTYPE)
    decay_until = tl.exp2(sum_gates(gate_sum_matrices, UNTIL_END, gates_high, gates_low, spec))
    dk = (
        dot(
            v, tl.trans(load_chunk_block(dstates, row // per.DSTATES, head, chunk, BLOCK_K, BLOCK_V, DTYPE, spec)), spec
        )
        * decay_until
    )
    k = load_head_tokens(key, row // per.KEY, location, spec.HK, spec.K, BLOCK_K, DTYPE, spec)
    chunk_dgate = tl.sum(dk * k.to(tl.float32), 0)
    q = load_head_tokens(query, row // per.QUERY, location, spec.HQ, spec.K, BLOCK_K, DTYPE, spec)
    b = load_head_tokens(read_vectors, row // per.READ_VECTORS, location, spec.H, spec.K, BLOCK_K, DTYPE, spec)
    dk = add_writer_gradients(dk, (query_dscores, read_dscores), (q, b), gates, are_weak, spec)
    dgates -= k.to(tl.float32) * dk
    dk += own_key_dscores[:, None] * q.to(tl.float32)
    store_token_rows(dkey_at, dk, first_token, sequence_end, 0, spec.H, spec.K, spec)

    # Write vectors, with reads in place of values.
    log2_gates = load_chunk_gates(decay, row // per.DECAY, location, DECAY_TOKENS, BLOCK_K, spec)
    gates_high, gates_low = split_gates_high_low(log2_gates, DTYPE)
    gates = (gate_sum_matrices, gates_high, gates_low)
    do = load_head_tokens(cotangent, row // per.COTANGENT, location, spec.H, spec.V, BLOCK_V, DTYPE, spec)
    y = load_chunk_block(reads, row // per.READS, head, chunk, CHUNK, BLOCK_V, DTYPE, spec)
    query_dscores, _ = dscores_and_diagonal(do, y, spec.OUTPUT_SCALE, spec)
    read_dscores = dot(
        load_chunk_block(dreads, row // per.DREADS, head, chunk, CHUNK, BLOCK_V, DTYPE, spec), tl.trans(y), spec
    ).to(DTYPE)
    decay_until = tl.exp2(sum_gates(gate_sum_matrices, UNTIL_END, gates_high, gates_low, spec))
    da = (
        dot(
            y, tl.trans(load_chunk_block(dstates, row // per.DSTATES, head, chunk, BLOCK_K, BLOCK_V, DTYPE, spec)), spec
        )
        * decay_until
    )
    a = load_head_tokens(write_vectors, row // per.WRITE_VECTORS, location, spec.H, spec.K, BLOCK_K, DTYPE, spec)
    chunk_dgate += tl.sum(da * a.to(tl.float32), 0)
    q = load_head_tokens(query, row // per.QUERY, location, spec.HQ, spec.K, BLOCK_K, DTYPE, spec)
    b = load_head_tokens(read_vectors, row // per.READ_VECTORS, location, spec.H, spec.K, BLOCK_K, DTYPE, spec)
    da = add_writer_gradients(da, (query_dscores, read_dscores), (q, b), gates, are_weak, spec)
    dgates -= a.to(tl.float32) * da
    da += own_write_dscores[:, None] * q.to(tl.float32)
    store_token_rows(dwrite_at, da, first_token, sequence_end, 0, spec.H, spec.K, spec)

    # Read vectors, whose sums of gates do not have the token's own.
    log2_gates = load_chunk_gates(decay, row // per.DECAY, location, DECAY_TOKENS, BLOCK_K, spec)
    gates_high, gates_low = split_gates_high_low(log2_gates, DTYPE)
    gates = (gate_sum_matrices, gates_high, gates_low)
    dz = load_chunk_block(dreads, row // per.DREADS, head, chunk, CHUNK, BLOCK_V, DTYPE, spec)
    v = load_head_tokens(value, row // per.VALUE, location, spec.HV, spec.V, BLOCK_V, DTYPE, spec)
    key_dscores = dot(dz, tl.trans(v), spec).to(DTYPE)
    write_dscores = dot(
        dz, tl.trans(load_chunk_block(reads, row // per.READS, head, chunk, CHUNK, BLOCK_V, DTYPE, spec)), spec
    ).to(DTYPE)
    decay_since = tl.exp2(sum_gates(gate_sum_matrices, SINCE_START_BEFORE_TOKEN, gates_high, gates_low, spec))
    state = load_chunk_block(states, row // per.STATES, head, chunk, BLOCK_K, BLOCK_V, DTYPE, spec)
    db = dot(dz, tl.trans(state), spec) * decay_since
    state_products = tl.sum(
        state.to(tl.float32)
        * load_chunk_block(dstates, row // per.DSTATES, head, chunk, BLOCK_K, BLOCK_V, DTYPE, spec).to(tl.float32),
        1,
    )
    chunk_dgate += state_products * tl.exp2(log2_chunk_decay)
    k = load_head_tokens(key, row // per.KEY, location, spec.HK, spec.K, BLOCK_K, DTYPE, spec)
    a = load_head_tokens(write_vectors, row // per.WRITE_VECTORS, location, spec.H, spec.K, BLOCK_K, DTYPE, spec)
    db = add_reader_gradients(db, (key_dscores, write_dscores), (k, a), gates, are_weak, True, spec)
    store_token_rows(dread_at, db, first_token, sequence_end, 0, spec.H, spec.K, spec)

    # A gate is in the sums of its own token and of later ones, and in those that later tokens' read vectors have.
    b = load_head_tokens(read_vectors, row // per.READ_VECTORS, location, spec.H, spec.K, BLOCK_K, DTYPE, spec)
    later_high, later_low = split_gates_high_low(dgates + b.to(tl.float32) * db, DTYPE)
    dgates += sum_gates(gate_sum_matrices, UNTIL_END, later_high, later_low, spec) + chunk_dgate[None, :]
    log2_gates = load_chunk_gates(decay, row // per.DECAY, location, DECAY_TOKENS, BLOCK_K, spec)
    dgates = tl.where(log2_gates < MIN_LOG2_GATE_WITH_GRADIENT, 0.0, dgates)
    store_token_rows(ddecay_at, dgates, first_token, sequence_end, 0, spec.H, spec.K, spec)
