"""Decays between a chunk's tokens with gates per key channel, as sums of the gates between them.

The kernels with the delta rule use these. They take the same time whatever the gates are, and are exact for all: see
`sub_chunk_scores`.
"""

import triton
import triton.language as tl

from ejkernel_triton.blocks import add_dot, dot
from ejkernel_triton.linear_recurrence.kernels.tile import diagonal_mask, masked_load, to_clamped_log2_gates

SINCE_START_MATRIX_INDEX, UNTIL_END_MATRIX_INDEX, FROM_MIDDLE_MATRIX_INDEX, TO_LEVEL_MIDPOINT_MATRIX_INDEX = (
    tl.constexpr(n) for n in range(4)
)
"""Indices of the matrices of `plan.make_gate_sum_matrices`; those of levels follow TO_LEVEL_MIDPOINT_MATRIX_INDEX."""


@triton.jit
def load_log_gates(
    base, first_token, sequence_end, column, STRIDE: tl.constexpr, COLUMNS: tl.constexpr, spec: tl.constexpr
):
    """Returns [CHUNK_SIZE, COLUMNS] log2 gates of a chunk's tokens; 0 for tokens from `sequence_end` on."""
    rows = tl.arange(0, spec.CHUNK_SIZE)
    columns = column + tl.arange(0, COLUMNS)
    at = base + (rows[:, None] * STRIDE + columns[None, :])
    valid = (first_token + rows < sequence_end)[:, None]
    gates = masked_load(at, valid, (columns < spec.K)[None, :], not spec.ALL_CHUNKS_FULL, spec.K % COLUMNS != 0)
    return to_clamped_log2_gates(gates)


@triton.jit
def multiply_by_decay(tile, decay):
    """Returns a tile times its decay, rounded to its dtype: an operand of products."""
    return (tile.to(tl.float32) * decay).to(tile.dtype)


@triton.jit
def split_gates_high_low(gates, dtype: tl.constexpr):
    """Returns log2 gates as the operands of `sum_gates`.

    For 16-bit tiles these are two bfloat16 terms of each gate: more digits than its 16-bit factors have, and all sums
    between tokens use the same rounded gates. The sum of a whole chunk, which kernels compute from the gates, has all
    digits.
    """
    if dtype == tl.float32:
        return gates, gates
    else:
        gates_high = gates.to(tl.bfloat16)
        return gates_high, (gates - gates_high.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def sum_gates(gate_sum_matrix_address, matrix_index, gates_high, gates_low, spec: tl.constexpr):
    """Returns sums of a chunk's gates, [CHUNK_SIZE, COLUMNS] float32: the product of a matrix of
    `make_gate_sum_matrices` and the gates.

    A scan along tokens takes several times as many instructions. And a difference of cumulative sums loses the digits
    of small gates after large ones, where this sum has only the gates between its two tokens.

    Args:
        gate_sum_matrix_address: Address of the matrices.
        matrix_index: Index of a matrix: SINCE_START_MATRIX_INDEX, UNTIL_END_MATRIX_INDEX, FROM_MIDDLE_MATRIX_INDEX, or
            TO_LEVEL_MIDPOINT_MATRIX_INDEX plus a level.
        gates_high: [CHUNK_SIZE, COLUMNS], from `split_gates_high_low`.
        gates_low: [CHUNK_SIZE, COLUMNS], from `split_gates_high_low`.
        spec: Constants.
    """
    CHUNK: tl.constexpr = spec.CHUNK_SIZE
    rows = tl.arange(0, CHUNK)
    # Loaded, from the cache: to compute the matrix in registers would take more registers and time than the product.
    matrix = tl.load(gate_sum_matrix_address + matrix_index * (CHUNK * CHUNK) + (rows[:, None] * CHUNK + rows[None, :]))
    if gates_high.dtype == tl.float32:
        return dot(matrix, gates_high, spec)
    else:
        return add_dot(dot(matrix, gates_high, spec), matrix, gates_low, spec)


@triton.jit
def level_pair_mask(level, spec: tl.constexpr):
    """Returns which pairs (later token, earlier token) a level's cuts separate: [CHUNK_SIZE, CHUNK_SIZE]."""
    rows = tl.arange(0, spec.CHUNK_SIZE)
    # The highest bit in which their indices differ is the level's.
    return (((rows[:, None] ^ rows[None, :]) >> level) == 1) & (rows[:, None] > rows[None, :])


@triton.jit
def sub_chunk_pair_mask(spec: tl.constexpr):
    """Returns which pairs (i, j) with j <= i have both tokens in the same sub-chunk: [CHUNK_SIZE, CHUNK_SIZE]."""
    rows = tl.arange(0, spec.CHUNK_SIZE)
    sub_chunk = rows // spec.SUB_CHUNK_SIZE
    return (sub_chunk[:, None] == sub_chunk[None, :]) & (rows[:, None] >= rows[None, :])


@triton.jit
def sub_chunk_scores(
    qk_scores, kk_scores, query, key, gates_high, gates_low, gate_sum_matrix_address, spec: tl.constexpr
):
    """Adds the scores of a tile of key channels to `qk_scores` and `kk_scores`, and returns both.

    For j <= i, `qk_scores` gets sum_k q_ik exp2(G_ik - G_jk) k_jk, and `kk_scores` the same with keys in place of
    queries. The diagonal of `kk_scores` is not used: it gets the products of keys with themselves if SUB_CHUNK_SIZE is
    above 1, and nothing if it is 1.

    The chunk is halved recursively until sub-chunks are left, four times if it has 64 tokens and sub-chunks have 4. The
    cut m of exactly one halving (level) separates each pair of different sub-chunks, and exp2(G_i - G_m) exp2(G_m -
    G_j) has one factor per token, neither of which is above 1. So a level is one product of the whole chunk, of which
    only the pairs that it separates are used. Pairs inside a sub-chunk are one more product, with factors relative to
    its middle: gates are at least -58, so with four tokens they are within 2 ** +-87.

           j ->
        i  0
        |  0 0             0: pairs inside a sub-chunk, here of two tokens
        v  2 2 0           n: pairs that the cut of a block of 2 n tokens separates
           2 2 0 0
           4 4 4 4 0
           4 4 4 4 0 0
           4 4 4 4 2 2 0
           4 4 4 4 2 2 0 0

    No branch depends on the gates, so neither does the time.

    Args:
        qk_scores: [CHUNK_SIZE, CHUNK_SIZE] float32, by (i, j).
        kk_scores: [CHUNK_SIZE, CHUNK_SIZE] float32.
        query: [CHUNK_SIZE, COLUMNS].
        key: [CHUNK_SIZE, COLUMNS].
        gates_high: [CHUNK_SIZE, COLUMNS], from `split_gates_high_low`.
        gates_low: [CHUNK_SIZE, COLUMNS], from `split_gates_high_low`.
        gate_sum_matrix_address: Address of the matrices of `sum_gates`.
        spec: Constants.
    """
    FIRST_LEVEL: tl.constexpr = spec.LOG2_SUB_CHUNK
    NUM_LEVELS: tl.constexpr = spec.LOG2_CHUNK
    # The loop is not unrolled: unrolled levels spill (docs/lab/linear_recurrence_gpu.md, "Halving as a loop").
    for level in tl.range(FIRST_LEVEL, NUM_LEVELS, num_stages=1, disable_licm=True):
        decay = tl.exp2(
            sum_gates(gate_sum_matrix_address, TO_LEVEL_MIDPOINT_MATRIX_INDEX + level, gates_high, gates_low, spec)
        )
        decayed_keys = multiply_by_decay(key, decay)
        # A product of the whole chunk, most of which the mask drops, so that all levels have one tile shape.
        qk_scores += tl.where(
            level_pair_mask(level, spec), dot(multiply_by_decay(query, decay), tl.trans(decayed_keys), spec), 0.0
        )
        kk_scores += tl.where(level_pair_mask(level, spec), dot(decayed_keys, tl.trans(decayed_keys), spec), 0.0)
    if spec.SUB_CHUNK_SIZE == 1:
        # A token with itself has no decay, and no token sees its own key.
        products = tl.sum(query.to(tl.float32) * key.to(tl.float32), 1)
        qk_scores += tl.where(diagonal_mask(spec), products[:, None], 0.0)
    else:
        relative_gates = sum_gates(gate_sum_matrix_address, FROM_MIDDLE_MATRIX_INDEX, gates_high, gates_low, spec)
        decayed_keys = multiply_by_decay(key, tl.exp2(-relative_gates))
        decay_since = tl.exp2(relative_gates)
        # Masked after the product: other pairs may be inf or NaN.
        qk_scores += tl.where(
            sub_chunk_pair_mask(spec), dot(multiply_by_decay(query, decay_since), tl.trans(decayed_keys), spec), 0.0
        )
        kk_scores += tl.where(
            sub_chunk_pair_mask(spec), dot(multiply_by_decay(key, decay_since), tl.trans(decayed_keys), spec), 0.0
        )
    return qk_scores, kk_scores
