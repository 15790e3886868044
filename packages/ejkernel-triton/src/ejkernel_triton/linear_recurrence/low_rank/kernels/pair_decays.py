"""Products of a chunk's tokens with the decay between them, for reads after a token's decay and before it.

A pair (i, j) of tokens has the decay of the gates between them: of tokens j + 1 to i where token i reads the state
after its own decay, and of j + 1 to i - 1 where it reads the state before it. Both are exp2(R_i - c) exp2(c - R_j) with
a cut c between the tokens, one factor per token, so that a product of two tiles has all pairs of a cut.

    weak gates      one step, with the cut in the chunk's middle: factors are within 2 ** +-MAX_LOG2_DECAY_FROM_MIDDLE
    other gates     step 0: the pairs inside of sub-chunks, with the cut in the sub-chunk's middle
                    further steps: a level of halving each, from the shortest blocks on, with the pairs that the cuts of
                    its blocks separate: no factor is above 1

RWKV-7 bounds its gates, so that they are weak in every chunk of 64 tokens.
"""

import triton
import triton.language as tl

from ejkernel_triton.blocks import dot
from ejkernel_triton.linear_recurrence.delta.kernels.sub_chunks import multiply_by_decay, sum_gates

SINCE_START, SINCE_START_BEFORE_TOKEN, UNTIL_END, CHUNK_MIDDLE, SUB_CHUNK_MIDDLE = (
    tl.constexpr(n) for n in (0, 1, 2, 3, 5)
)
"""Indices of the matrices of `plan.make_pair_gate_sum_matrices`. From CHUNK_MIDDLE on each is followed by the one for
reads before a token's decay, and those of SUB_CHUNK_MIDDLE by those of the levels."""

MAX_LOG2_FACTOR = tl.constexpr(88.0)
"""Largest log2 factor of a token inside of a sub-chunk. Larger ones, which no pair has, would be inf, and 0 inf is
NaN."""


@triton.jit
def gates_are_weak(gate_sum_matrices, gates_high, gates_low, spec: tl.constexpr):
    """Returns whether all pairs of a chunk are products of factors relative to its middle."""
    gates_from_middle = sum_gates(gate_sum_matrices, CHUNK_MIDDLE, gates_high, gates_low, spec)
    # A maximum over the whole tile, so that the number of steps is the same in all threads.
    return tl.max(tl.max(tl.abs(gates_from_middle), 1), 0) < spec.MAX_LOG2_DECAY_FROM_MIDDLE


@triton.jit
def reader_decay(step, gates, ARE_WEAK: tl.constexpr, IS_BEFORE_DECAY: tl.constexpr, spec: tl.constexpr):
    """Returns the factors [CHUNK_SIZE, COLUMNS] of the later tokens of a step's pairs, which read the state."""
    gate_sum_matrices, gates_high, gates_low = gates
    index = _step_matrix_index(step, ARE_WEAK) + (1 if IS_BEFORE_DECAY else 0)
    log2_decay = sum_gates(gate_sum_matrices, index, gates_high, gates_low, spec)
    return _bounded_exp2(log2_decay, step, ARE_WEAK, spec)


@triton.jit
def writer_decay(step, gates, ARE_WEAK: tl.constexpr, spec: tl.constexpr):
    """Returns the factors [CHUNK_SIZE, COLUMNS] of the earlier tokens of a step's pairs, which wrote to the state."""
    gate_sum_matrices, gates_high, gates_low = gates
    log2_decay = -sum_gates(gate_sum_matrices, _step_matrix_index(step, ARE_WEAK), gates_high, gates_low, spec)
    return _bounded_exp2(log2_decay, step, ARE_WEAK, spec)


@triton.jit
def _step_matrix_index(step, ARE_WEAK: tl.constexpr):
    """Returns the index of the matrix of a step, for tokens that read after their decay and for writers."""
    if ARE_WEAK:
        return CHUNK_MIDDLE
    else:
        return SUB_CHUNK_MIDDLE + 2 * step


@triton.jit
def _bounded_exp2(log2_decay, step, ARE_WEAK: tl.constexpr, spec: tl.constexpr):
    """Returns exp2 of the decay of tokens, at most the largest factor of a step's pairs."""
    if ARE_WEAK:
        return tl.exp2(tl.minimum(log2_decay, spec.MAX_LOG2_DECAY_FROM_MIDDLE))
    else:
        return tl.exp2(tl.minimum(log2_decay, tl.where(step > 0, 0.0, MAX_LOG2_FACTOR)))


@triton.jit
def step_pair_mask(step, ARE_WEAK: tl.constexpr, spec: tl.constexpr):
    """Returns which pairs (i, j) of different tokens, i after j, a step has: [CHUNK_SIZE, CHUNK_SIZE]."""
    rows = tl.arange(0, spec.CHUNK_SIZE)
    if ARE_WEAK:
        return rows[:, None] > rows[None, :]
    else:
        # The highest bit in which the indices of two tokens differ is the level whose cuts separate them.
        difference = rows[:, None] ^ rows[None, :]
        end = spec.SUB_CHUNK_SIZE << step
        smallest = tl.where(step > 0, end >> 1, 1)
        return (difference >= smallest) & (difference < end) & (rows[:, None] > rows[None, :])


@triton.jit
def add_pair_scores(
    scores,
    reader,
    key,
    write_vector,
    gates,
    step,
    ARE_WEAK: tl.constexpr,
    IS_BEFORE_DECAY: tl.constexpr,
    spec: tl.constexpr,
):
    """Adds the products of a step's pairs to both scores of `pair_scores`, and returns them."""
    key_scores, write_scores = scores
    decayed_reader = multiply_by_decay(reader, reader_decay(step, gates, ARE_WEAK, IS_BEFORE_DECAY, spec))
    decay = writer_decay(step, gates, ARE_WEAK, spec)
    mask = step_pair_mask(step, ARE_WEAK, spec)
    # Masked after the product, since pairs of other steps may be large. They are finite, so they affect no other pair.
    key_scores += tl.where(mask, dot(decayed_reader, tl.trans(multiply_by_decay(key, decay)), spec), 0.0)
    write_scores += tl.where(mask, dot(decayed_reader, tl.trans(multiply_by_decay(write_vector, decay)), spec), 0.0)
    return key_scores, write_scores


@triton.jit
def pair_scores(reader, key, write_vector, gates, are_weak, IS_BEFORE_DECAY: tl.constexpr, spec: tl.constexpr):
    """Returns the decayed products of a chunk's readers with its keys, and with its write vectors: both
    [CHUNK_SIZE, CHUNK_SIZE] float32.

    Args:
        reader: [CHUNK_SIZE, COLUMNS], the vectors that read the state.
        key: [CHUNK_SIZE, COLUMNS].
        write_vector: [CHUNK_SIZE, COLUMNS].
        gates: Address of the matrices of `sum_gates`, and both terms of the gates.
        are_weak: From `gates_are_weak`.
        IS_BEFORE_DECAY: Whether readers read the state before their token's decay and write, instead of after both.
        spec: Constants.
    """
    CHUNK: tl.constexpr = spec.CHUNK_SIZE
    LEVELS: tl.constexpr = spec.LOG2_CHUNK - spec.LOG2_SUB_CHUNK
    key_scores = tl.zeros([CHUNK, CHUNK], tl.float32)
    write_scores = tl.zeros([CHUNK, CHUNK], tl.float32)
    if not IS_BEFORE_DECAY:
        # A token's own key and write vector have no decay.
        rows = tl.arange(0, CHUNK)
        is_diagonal = rows[:, None] == rows[None, :]
        reads = reader.to(tl.float32)
        key_scores = tl.where(is_diagonal, tl.sum(reads * key.to(tl.float32), 1)[:, None], 0.0)
        write_scores = tl.where(is_diagonal, tl.sum(reads * write_vector.to(tl.float32), 1)[:, None], 0.0)
    if are_weak:
        key_scores, write_scores = add_pair_scores(
            (key_scores, write_scores), reader, key, write_vector, gates, 0, True, IS_BEFORE_DECAY, spec
        )
    else:
        # The loop is not unrolled: unrolled levels spill (docs/lab/linear_recurrence_gpu.md, "Halving as a loop").
        for step in tl.range(0, LEVELS + 1, num_stages=1, disable_licm=True):
            key_scores, write_scores = add_pair_scores(
                (key_scores, write_scores), reader, key, write_vector, gates, step, False, IS_BEFORE_DECAY, spec
            )
    return key_scores, write_scores
