"""Computes what each chunk does to the state, and what its tokens read of it, from the chunk's tokens alone.

With S the state before a chunk, D its decay, and primes for vectors with their decay from the chunk's start or to its
end, the low-rank reads of a chunk are Y = T (B' S + L V), where L has the pairs of read vectors b and keys and T is the
inverse of I minus those of read and write vectors. So both the reads and the state after the chunk are linear in S:

    output       = scale (Q' + Aqa T B') S + scale (Aqk V + Aqa T L V)
    S afterwards = (D + A'^T T B') S + K'^T V + A'^T T L V

    b, k, a, gates  -> L, T                          see `pair_decays` and `solve_tril`
    T, b, L, V      -> W = T B', U = T L V           the reads' factor of S, and the reads if S is 0
    q, k, a, gates  -> Aqk, Aqa                      pairs of queries with keys and with write vectors
    a, k, W, U, V   -> everything that is stored

D is stored separately from A'^T W, in float32, so that a decay close to 1 keeps its digits over all chunks.
"""

import triton
import triton.language as tl

from ejkernel_triton.blocks import add_dot, dot
from ejkernel_triton.linear_recurrence.delta.kernels.solve_tril import solve_tril
from ejkernel_triton.linear_recurrence.delta.kernels.sub_chunks import (
    load_log_gates,
    multiply_by_decay,
    split_gates_high_low,
    sum_gates,
)
from ejkernel_triton.linear_recurrence.kernels.tile import (
    chunk_address,
    chunk_start_and_sequence_end,
    load_token_rows,
    score_pointers,
)
from ejkernel_triton.linear_recurrence.low_rank.kernels.pair_decays import (
    SINCE_START,
    SINCE_START_BEFORE_TOKEN,
    UNTIL_END,
    gates_are_weak,
    pair_scores,
)


@triton.jit
def chunk_block_pointers(
    base, row, head, chunk, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, spec: tl.constexpr
):
    """Returns pointers [ROWS, BLOCK] to a chunk's columns from `column` on in [rows, H, NUM_CHUNKS, ROWS, COLUMNS]."""
    index = (tl.cast(row, tl.int64) * spec.H + head) * spec.NUM_CHUNKS + chunk
    columns = column + tl.arange(0, BLOCK)
    return base + index * (ROWS * COLUMNS) + (tl.arange(0, ROWS)[:, None] * COLUMNS + columns[None, :])


@triton.jit
def load_chunk_block(
    base, row, head, chunk, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DTYPE: tl.constexpr, spec: tl.constexpr
):
    """Returns a chunk's block [ROWS, COLUMNS] of [rows, H, NUM_CHUNKS, ROWS, COLUMNS] in DTYPE."""
    return tl.load(chunk_block_pointers(base, row, head, chunk, 0, ROWS, COLUMNS, COLUMNS, spec)).to(DTYPE)


@triton.jit
def load_head_tokens(
    array,
    entry,
    chunk_location,
    NUM_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    DTYPE: tl.constexpr,
    spec: tl.constexpr,
):
    """Returns [CHUNK_SIZE, COLUMNS] of a head's tokens in DTYPE, of the array's batch entry `entry`."""
    head, first_token, sequence_end = chunk_location
    base = chunk_address(array, entry, first_token, head // (spec.H // NUM_HEADS), spec.T, NUM_HEADS, WIDTH)
    return load_token_rows(base, first_token, sequence_end, 0, NUM_HEADS, WIDTH, COLUMNS, spec).to(DTYPE)


@triton.jit
def load_chunk_gates(
    decay, entry, chunk_location, DECAY_TOKENS: tl.constexpr, COLUMNS: tl.constexpr, spec: tl.constexpr
):
    """Returns [CHUNK_SIZE, COLUMNS] log2 gates of a head's tokens; DECAY_TOKENS is 1 if all tokens share one gate."""
    head, first_token, sequence_end = chunk_location
    base = chunk_address(decay, entry, first_token * (DECAY_TOKENS > 1), head, DECAY_TOKENS, spec.H, spec.K)
    STRIDE: tl.constexpr = (DECAY_TOKENS > 1) * spec.H * spec.K
    return load_log_gates(base, first_token, sequence_end, 0, STRIDE, COLUMNS, spec)


@triton.jit
def chunk_transitions_kernel(
    query,
    key,
    value,
    decay,
    write_vectors,
    read_vectors,
    gate_sum_matrices,
    chunk_starts,
    sequence_ends,
    log2_chunk_decay,
    state_readers,
    intra_chunk_outputs,
    state_products,
    state_writes,
    inverse,
    spec: tl.constexpr,
    per: tl.constexpr,
    DECAY_TOKENS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STORE_INVERSE: tl.constexpr,
):
    """Computes one chunk of one head; see `forward.chunk_transitions`."""
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
    chunk_decay = tl.sum(log2_gates, 0)
    gates_high, gates_low = split_gates_high_low(log2_gates, DTYPE)
    gates = (gate_sum_matrices, gates_high, gates_low)
    are_weak = gates_are_weak(gate_sum_matrices, gates_high, gates_low, spec)
    k = load_head_tokens(key, row // per.KEY, location, spec.HK, spec.K, BLOCK_K, DTYPE, spec)
    a = load_head_tokens(write_vectors, row // per.WRITE_VECTORS, location, spec.H, spec.K, BLOCK_K, DTYPE, spec)
    b = load_head_tokens(read_vectors, row // per.READ_VECTORS, location, spec.H, spec.K, BLOCK_K, DTYPE, spec)
    key_scores, write_scores = pair_scores(b, k, a, gates, are_weak, True, spec)
    inverse_tile = solve_tril(-write_scores, spec).to(DTYPE)
    # The stores keep the compiler from merging loads before and after them, which would hold the tiles in registers.
    decay_address = log2_chunk_decay + ((tl.cast(row, tl.int64) * spec.H + head) * spec.NUM_CHUNKS + chunk) * BLOCK_K
    tl.store(decay_address + tl.arange(0, BLOCK_K), chunk_decay)
    if STORE_INVERSE:
        tl.store(score_pointers(inverse, row, head, chunk, spec), inverse_tile)
    decay_since = tl.exp2(sum_gates(gate_sum_matrices, SINCE_START_BEFORE_TOKEN, gates_high, gates_low, spec))
    b = load_head_tokens(read_vectors, row // per.READ_VECTORS, location, spec.H, spec.K, BLOCK_K, DTYPE, spec)
    w = dot(inverse_tile, multiply_by_decay(b, decay_since), spec).to(DTYPE)
    v = load_head_tokens(value, row // per.VALUE, location, spec.HV, spec.V, BLOCK_V, DTYPE, spec)
    u = dot(inverse_tile, dot(key_scores.to(DTYPE), v, spec).to(DTYPE), spec).to(DTYPE)
    q = load_head_tokens(query, row // per.QUERY, location, spec.HQ, spec.K, BLOCK_K, DTYPE, spec)
    k = load_head_tokens(key, row // per.KEY, location, spec.HK, spec.K, BLOCK_K, DTYPE, spec)
    a = load_head_tokens(write_vectors, row // per.WRITE_VECTORS, location, spec.H, spec.K, BLOCK_K, DTYPE, spec)
    key_scores, write_scores = pair_scores(q, k, a, gates, are_weak, False, spec)
    write_operand = write_scores.to(DTYPE)
    output = add_dot(dot(write_operand, u, spec), key_scores.to(DTYPE), v, spec)
    at = chunk_block_pointers(intra_chunk_outputs, row, head, chunk, 0, CHUNK, BLOCK_V, BLOCK_V, spec)
    tl.store(at, (output * spec.OUTPUT_SCALE).to(DTYPE))
    decay_since = tl.exp2(sum_gates(gate_sum_matrices, SINCE_START, gates_high, gates_low, spec))
    readers = add_dot(q.to(tl.float32) * decay_since, write_operand, w, spec)
    at = chunk_block_pointers(state_readers, row, head, chunk, 0, CHUNK, BLOCK_K, BLOCK_K, spec)
    tl.store(at, (readers * spec.OUTPUT_SCALE).to(DTYPE))
    decay_until = tl.exp2(sum_gates(gate_sum_matrices, UNTIL_END, gates_high, gates_low, spec))
    transposed_writes = tl.trans(multiply_by_decay(a, decay_until))
    at = chunk_block_pointers(state_products, row, head, chunk, 0, BLOCK_K, BLOCK_K, BLOCK_K, spec)
    tl.store(at, dot(transposed_writes, w, spec).to(DTYPE))
    writes = add_dot(dot(transposed_writes, u, spec), tl.trans(multiply_by_decay(k, decay_until)), v, spec)
    at = chunk_block_pointers(state_writes, row, head, chunk, 0, BLOCK_K, BLOCK_V, BLOCK_V, spec)
    tl.store(at, writes.to(state_writes.dtype.element_ty))
