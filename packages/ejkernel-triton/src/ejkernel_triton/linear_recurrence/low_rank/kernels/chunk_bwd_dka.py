"""Computes gradients of keys and of the write vectors of the low-rank term, and their terms of the gates' gradient.

Readers are the queries, with the cotangent scale dO, and the read vectors, with dZ; writers are the keys, with the
values V, and the write vectors, with the reads Y (letters as in `chunk_bwd_dvy`). With w_ij the decay of a pair:

    dk_j = exp2(G_C - G_j) dS V_j + sum_{i >= j} w_ij scale <dO_i, V_j> q_i + sum_{i > j} w_ij <dZ_i, V_j> b_i
    da_j = the same with Y_j in place of V_j
    dG_j = -k_j dk_j - a_j da_j, and at the chunk's end the sum of k dk + a da of the terms with dS

Each gradient is stored before the next is computed, to save registers. `chunk_bwd_dqb` computes the gradients of
readers, and adds their terms to the gates' gradient.
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
    store_token_rows,
)
from ejkernel_triton.linear_recurrence.low_rank.kernels.chunk_transitions import (
    chunk_block_pointers,
    load_chunk_block,
    load_chunk_gates,
    load_head_tokens,
)
from ejkernel_triton.linear_recurrence.low_rank.kernels.pair_decays import (
    UNTIL_END,
    gates_are_weak,
    reader_decay,
    step_pair_mask,
    writer_decay,
)


@triton.jit
def dscores_and_diagonal(cotangents, written, SCALE: tl.constexpr, spec: tl.constexpr):
    """Returns the gradients of scores, `SCALE <c_i, x_j>` for cotangents c and values or reads x, [CHUNK_SIZE,
    CHUNK_SIZE] in the cotangents' dtype; and their diagonal, each token with itself, [CHUNK_SIZE] float32.
    """
    dscores = dot(cotangents, tl.trans(written), spec) * SCALE
    rows = tl.arange(0, spec.CHUNK_SIZE)
    diagonal = tl.sum(tl.where(rows[:, None] == rows[None, :], dscores, 0.0), 1)
    return dscores.to(cotangents.dtype), diagonal


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
def writer_gradient(writer, written, cotangents, dstate, readers, gates, are_weak, spec: tl.constexpr):
    """Returns the gradient of a chunk's keys or write vectors, [CHUNK_SIZE, COLUMNS] float32; its product with them,
    without the terms of a token with itself, which cancel in the gradient of the gates; and the sum over tokens of the
    products of the terms with dS, [COLUMNS].

    Args:
        writer: [CHUNK_SIZE, COLUMNS], the keys or write vectors.
        written: [CHUNK_SIZE, VALUES], the values or reads that they write.
        cotangents: Cotangents of the outputs and of the reads, [CHUNK_SIZE, VALUES] both.
        dstate: [COLUMNS, VALUES], gradient of the state after the chunk.
        readers: Queries and read vectors, [CHUNK_SIZE, COLUMNS] both.
        gates: As in `pair_scores`.
        are_weak: As in `pair_scores`.
        spec: Constants.
    """
    gate_sum_matrices, gates_high, gates_low = gates
    output_cotangents, read_cotangents = cotangents
    query_dscores, diagonal_dscores = dscores_and_diagonal(output_cotangents, written, spec.OUTPUT_SCALE, spec)
    read_dscores = dot(read_cotangents, tl.trans(written), spec).to(writer.dtype)
    decay_until = tl.exp2(sum_gates(gate_sum_matrices, UNTIL_END, gates_high, gates_low, spec))
    gradient = dot(written, tl.trans(dstate), spec) * decay_until
    chunk_products = tl.sum(gradient * writer.to(tl.float32), 0)
    gradient = add_writer_gradients(gradient, (query_dscores, read_dscores), readers, gates, are_weak, spec)
    products = writer.to(tl.float32) * gradient
    queries, _ = readers
    return gradient + diagonal_dscores[:, None] * queries.to(tl.float32), products, chunk_products


@triton.jit
def chunk_bwd_dka_kernel(
    query,
    key,
    value,
    decay,
    write_vectors,
    read_vectors,
    gate_sum_matrices,
    reads,
    dreads,
    dstates,
    cotangent,
    chunk_starts,
    sequence_ends,
    dkey,
    dwrite_vectors,
    writer_dgates,
    chunk_dgates,
    spec: tl.constexpr,
    per: tl.constexpr,
    DECAY_TOKENS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Computes one chunk of one head; see `backward.writer_gradients`."""
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
    q = load_head_tokens(query, row // per.QUERY, location, spec.HQ, spec.K, BLOCK_K, DTYPE, spec)
    b = load_head_tokens(read_vectors, row // per.READ_VECTORS, location, spec.H, spec.K, BLOCK_K, DTYPE, spec)
    do = load_head_tokens(cotangent, row // per.COTANGENT, location, spec.H, spec.V, BLOCK_V, DTYPE, spec)
    dz = load_chunk_block(dreads, row // per.DREADS, head, chunk, CHUNK, BLOCK_V, DTYPE, spec)
    dstate = load_chunk_block(dstates, row // per.DSTATES, head, chunk, BLOCK_K, BLOCK_V, DTYPE, spec)
    v = load_head_tokens(value, row // per.VALUE, location, spec.HV, spec.V, BLOCK_V, DTYPE, spec)
    k = load_head_tokens(key, row // per.KEY, location, spec.HK, spec.K, BLOCK_K, DTYPE, spec)
    dk, key_products, chunk_dgate = writer_gradient(k, v, (do, dz), dstate, (q, b), gates, are_weak, spec)
    at = chunk_address(dkey, row, first_token, head, spec.T, spec.H, spec.K)
    store_token_rows(at, dk, first_token, sequence_end, 0, spec.H, spec.K, spec)

    # All tiles are loaded again after the store, from the cache: together they would not fit the registers.
    log2_gates = load_chunk_gates(decay, row // per.DECAY, location, DECAY_TOKENS, BLOCK_K, spec)
    gates_high, gates_low = split_gates_high_low(log2_gates, DTYPE)
    gates = (gate_sum_matrices, gates_high, gates_low)
    q = load_head_tokens(query, row // per.QUERY, location, spec.HQ, spec.K, BLOCK_K, DTYPE, spec)
    b = load_head_tokens(read_vectors, row // per.READ_VECTORS, location, spec.H, spec.K, BLOCK_K, DTYPE, spec)
    do = load_head_tokens(cotangent, row // per.COTANGENT, location, spec.H, spec.V, BLOCK_V, DTYPE, spec)
    dz = load_chunk_block(dreads, row // per.DREADS, head, chunk, CHUNK, BLOCK_V, DTYPE, spec)
    dstate = load_chunk_block(dstates, row // per.DSTATES, head, chunk, BLOCK_K, BLOCK_V, DTYPE, spec)
    y = load_chunk_block(reads, row // per.READS, head, chunk, CHUNK, BLOCK_V, DTYPE, spec)
    a = load_head_tokens(write_vectors, row // per.WRITE_VECTORS, location, spec.H, spec.K, BLOCK_K, DTYPE, spec)
    da, write_products, chunk_products = writer_gradient(a, y, (do, dz), dstate, (q, b), gates, are_weak, spec)
    at = chunk_address(dwrite_vectors, row, first_token, head, spec.T, spec.H, spec.K)
    store_token_rows(at, da, first_token, sequence_end, 0, spec.H, spec.K, spec)
    at = chunk_block_pointers(writer_dgates, row, head, chunk, 0, CHUNK, BLOCK_K, BLOCK_K, spec)
    tl.store(at, -(key_products + write_products))
    at = chunk_dgates + ((tl.cast(row, tl.int64) * spec.H + head) * spec.NUM_CHUNKS + chunk) * BLOCK_K
    tl.store(at + tl.arange(0, BLOCK_K), chunk_dgate + chunk_products)
