"""Decays between a chunk's tokens with gates per key channel, as sums of the gates between them.

The kernels with the delta rule use these. They take the same time whatever the gates are, and are exact for all: see
`sub_chunk_scores`.
"""

import triton
import triton.language as tl

from ejkernel_triton.blocks import add_dot, dot
from ejkernel_triton.linear_recurrence.kernels.tile import diagonal, masked_load, powers_of_two

SINCE_START, UNTIL_END, FROM_MIDDLE, TO_CUT = (tl.constexpr(n) for n in range(4))
"""Indices of the matrices of `plan.gate_signs`; those of levels follow TO_CUT."""


@triton.jit
def load_log_gates(base, start, end, column, STRIDE: tl.constexpr, COLUMNS: tl.constexpr, spec: tl.constexpr):
    """Returns [CHUNK, COLUMNS] log2 gates of a chunk's tokens; 0 for tokens from `end` on."""
    rows = tl.arange(0, spec.CHUNK)
    columns = column + tl.arange(0, COLUMNS)
    at = base + (rows[:, None] * STRIDE + columns[None, :])
    valid = (start + rows < end)[:, None]
    gates = masked_load(at, valid, (columns < spec.K)[None, :], not spec.FULL_CHUNKS, spec.K % COLUMNS != 0)
    return powers_of_two(gates)


@triton.jit
def decayed(tile, decay):
    """Returns a tile times its decay, rounded to its dtype: an operand of products."""
    return (tile.to(tl.float32) * decay).to(tile.dtype)


@triton.jit
def gate_operands(gates, dtype: tl.constexpr):
    """Returns log2 gates as the operands of `gate_sums`.

    For 16-bit tiles these are two bfloat16 terms of each gate: more digits than its 16-bit factors have, and all sums
    use the same rounded gates.
    """
    if dtype == tl.float32:
        return gates, gates
    else:
        high = gates.to(tl.bfloat16)
        return high, (gates - high.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def gate_sums(signs, which, high, low, spec: tl.constexpr):
    """Returns sums of a chunk's gates, [CHUNK, COLUMNS] float32: the product of a matrix of `gate_signs` and the gates.

    A scan along tokens takes several times as many instructions. And a difference of cumulative sums loses the digits
    of small gates after large ones, where this sum has only the gates between its two tokens.

    Args:
        signs: Address of the matrices.
        which: Index of a matrix: SINCE_START, UNTIL_END, FROM_MIDDLE, or TO_CUT plus a level.
        high: [CHUNK, COLUMNS], from `gate_operands`.
        low: [CHUNK, COLUMNS], likewise.
        spec: Constants.
    """
    C: tl.constexpr = spec.CHUNK
    rows = tl.arange(0, C)
    # Loaded from the cache: computed in registers they would take more of them, and more time, than the product.
    matrix = tl.load(signs + which * (C * C) + (rows[:, None] * C + rows[None, :]))
    if high.dtype == tl.float32:
        return dot(matrix, high, spec)
    else:
        return add_dot(dot(matrix, high, spec), matrix, low, spec)


@triton.jit
def level_pairs(level, spec: tl.constexpr):
    """Returns which pairs (later token, earlier token) a level's cuts separate: [CHUNK, CHUNK]."""
    rows = tl.arange(0, spec.CHUNK)
    # The highest bit in which their indices differ is the level's.
    return (((rows[:, None] ^ rows[None, :]) >> level) == 1) & (rows[:, None] > rows[None, :])


@triton.jit
def sub_chunk_pairs(spec: tl.constexpr):
    """Returns which pairs (i, j) with j <= i have both tokens in the same sub-chunk: [CHUNK, CHUNK]."""
    rows = tl.arange(0, spec.CHUNK)
    sub_chunk = rows // spec.SUB_CHUNK
    return (sub_chunk[:, None] == sub_chunk[None, :]) & (rows[:, None] >= rows[None, :])


@triton.jit
def sub_chunk_scores(read, seen, query, key, high, low, signs, spec: tl.constexpr):
    """Returns read plus sum_k q_ik exp2(G_ik - G_jk) k_jk for j <= i, over a tile of key channels, and seen plus the
    same of keys in place of queries.

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
        read: [CHUNK, CHUNK] float32, by (i, j).
        seen: [CHUNK, CHUNK] float32.
        query: [CHUNK, COLUMNS].
        key: [CHUNK, COLUMNS].
        high: [CHUNK, COLUMNS], from `gate_operands`.
        low: [CHUNK, COLUMNS], likewise.
        signs: Address of the matrices of `gate_sums`.
    """
    FIRST: tl.constexpr = spec.SUB_LEVEL
    LEVELS: tl.constexpr = spec.LEVELS
    # The loop is not unrolled: unrolled levels spill (docs/lab/linear_recurrence_gpu.md, "Halving as a loop").
    for level in tl.range(FIRST, LEVELS, num_stages=1, disable_licm=True):
        decay = tl.exp2(gate_sums(signs, TO_CUT + level, high, low, spec))
        right = decayed(key, decay)
        # A product of the whole chunk, most of which the mask drops, so that all levels have one tile shape.
        read += tl.where(level_pairs(level, spec), dot(decayed(query, decay), tl.trans(right), spec), 0.0)
        seen += tl.where(level_pairs(level, spec), dot(right, tl.trans(right), spec), 0.0)
    if spec.SUB_CHUNK == 1:
        # A token with itself has no decay, and no token sees its own key.
        products = tl.sum(query.to(tl.float32) * key.to(tl.float32), 1)
        read += tl.where(diagonal(spec), products[:, None], 0.0)
    else:
        relative = gate_sums(signs, FROM_MIDDLE, high, low, spec)
        right = decayed(key, tl.exp2(-relative))
        since = tl.exp2(relative)
        # Masked after the product: other pairs may be inf or NaN.
        read += tl.where(sub_chunk_pairs(spec), dot(decayed(query, since), tl.trans(right), spec), 0.0)
        seen += tl.where(sub_chunk_pairs(spec), dot(decayed(key, since), tl.trans(right), spec), 0.0)
    return read, seen
