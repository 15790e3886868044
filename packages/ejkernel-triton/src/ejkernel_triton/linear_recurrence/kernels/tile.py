"""Device helpers of the linear recurrence kernels: tiles of a chunk, and products of pairs with their decay."""

import triton
import triton.language as tl

from ejkernel_triton.blocks import LOG2E, add_dot, dot

MIN_LOG2_GATE = tl.constexpr(-58.0)

SINCE_START, UNTIL_END, FROM_MIDDLE, TO_CUT = (tl.constexpr(n) for n in range(4))
"""Indices of the matrices of `plan.gate_signs`; those of levels follow TO_CUT."""


@triton.jit
def chunk_span(starts, ends, row, chunk, spec: tl.constexpr, per: tl.constexpr):
    """Returns the first token of a chunk, and the end of its sequence."""
    if spec.PER_SEQUENCE == 0:
        # Packed sequences are split into chunks separately, so a chunk has tokens of one sequence only. A program needs
        # these two indices before anything else, so they are precomputed for all chunks.
        return (
            tl.load(starts + (row // per.STARTS) * spec.CHUNKS + chunk),
            tl.load(ends + (row // per.ENDS) * spec.CHUNKS + chunk),
        )
    else:
        return chunk * spec.CHUNK, chunk * 0 + spec.T


@triton.jit
def scan_span(bounds, first_chunks, row, sequence, spec: tl.constexpr, per: tl.constexpr):
    """Returns a sequence's or segment's first chunk and the one after its last, its first token and the end of its
    tokens.
    """
    if spec.PER_SEQUENCE == 0:
        first_chunks += (row // per.FIRST_CHUNKS) * (spec.SEQUENCES + 1) + sequence
        bounds += (row // per.BOUNDS) * (spec.SEQUENCES + 2) + sequence
        return tl.load(first_chunks), tl.load(first_chunks + 1), tl.load(bounds), tl.load(bounds + 1)
    else:
        first = sequence * spec.PER_SEQUENCE
        return first, tl.minimum(first + spec.PER_SEQUENCE, spec.CHUNKS), first * spec.CHUNK, first * 0 + spec.T


@triton.jit
def nth_sequence(order, row, n, spec: tl.constexpr, per: tl.constexpr):
    """Returns the sequence or segment of the n-th scan of a row."""
    if spec.PER_SEQUENCE == 0:
        return tl.load(order + (row // per.ORDER) * spec.SEQUENCES + n)
    else:
        return n


@triton.jit
def masked_load(at, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Returns a tile; 0 where a row or column is masked."""
    # A mask costs time even if it is always true, so there are four loads instead of one with constant masks.
    if ROWS:
        if COLUMNS:
            return tl.load(at, mask=rows & columns, other=0.0)
        else:
            return tl.load(at, mask=rows, other=0.0)
    else:
        if COLUMNS:
            return tl.load(at, mask=columns, other=0.0)
        else:
            return tl.load(at)


@triton.jit
def chunk_base(base, row, start, head, T: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr):
    """Returns the address of a head's first token of a chunk in [rows, T, HEADS, WIDTH]."""
    # The tile's address has 64 bits, offsets within it 32: 64-bit offsets of elements take registers.
    return base + ((tl.cast(row, tl.int64) * T + start) * HEADS + head) * WIDTH


@triton.jit
def load_rows(
    base,
    start,
    end,
    column,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    spec: tl.constexpr,
    BLOCK: tl.constexpr = None,
):
    """Loads [BLOCK, COLUMNS] of a chunk's tokens from `chunk_base` on, all if BLOCK is None; 0 for tokens from `end`
    on.
    """
    ROWS: tl.constexpr = spec.CHUNK if BLOCK is None else BLOCK
    rows = tl.arange(0, ROWS)
    columns = column + tl.arange(0, COLUMNS)
    at = base + (rows[:, None] * (HEADS * WIDTH) + columns[None, :])
    valid = (start + rows < end)[:, None]
    return masked_load(at, valid, (columns < WIDTH)[None, :], not spec.FULL_CHUNKS, WIDTH % COLUMNS != 0)


@triton.jit
def load_columns(
    base,
    start,
    end,
    column,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    spec: tl.constexpr,
):
    """Returns `load_rows` transposed, [COLUMNS, CHUNK]."""
    rows = tl.arange(0, spec.CHUNK)
    columns = column + tl.arange(0, COLUMNS)
    # Addresses are transposed, not the tile in registers. Triton assigns lanes along the contiguous axis, which is the
    # first one here, so a warp still reads whole rows of memory.
    at = base + (rows[None, :] * (HEADS * WIDTH) + columns[:, None])
    valid = (start + rows < end)[None, :]
    return masked_load(at, valid, (columns < WIDTH)[:, None], not spec.FULL_CHUNKS, WIDTH % COLUMNS != 0)


@triton.jit
def store_rows(
    base,
    tile,
    start,
    end,
    column,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    spec: tl.constexpr,
):
    """Stores a tile to the addresses that `load_rows` reads."""
    rows = tl.arange(0, tile.shape[0])
    columns = column + tl.arange(0, tile.shape[1])
    at = base + (rows[:, None] * (HEADS * WIDTH) + columns[None, :])
    valid = (start + rows < end)[:, None] & (columns < WIDTH)[None, :]
    tl.store(at, tile.to(base.dtype.element_ty), mask=valid)


@triton.jit
def state_base(states, row, head, chunk, spec: tl.constexpr):
    """Returns the address of a chunk's state in [rows, H, CHUNKS, K, V]."""
    return states + ((tl.cast(row, tl.int64) * spec.H + head) * spec.CHUNKS + chunk) * (spec.K * spec.V)


@triton.jit
def load_state(base, k_start, v_start, ROWS: tl.constexpr, COLUMNS: tl.constexpr, spec: tl.constexpr):
    """Returns [ROWS, COLUMNS] of a state from key channel k and value channel v on."""
    rows = k_start + tl.arange(0, ROWS)
    columns = v_start + tl.arange(0, COLUMNS)
    at = base + (rows[:, None] * spec.V + columns[None, :])
    return masked_load(
        at, (rows < spec.K)[:, None], (columns < spec.V)[None, :], spec.K % ROWS != 0, spec.V % COLUMNS != 0
    )


@triton.jit
def store_state(base, tile, k_start, v_start, spec: tl.constexpr):
    """Stores a tile of a state."""
    rows = k_start + tl.arange(0, tile.shape[0])
    columns = v_start + tl.arange(0, tile.shape[1])
    at = base + (rows[:, None] * spec.V + columns[None, :])
    tl.store(at, tile.to(base.dtype.element_ty), mask=(rows < spec.K)[:, None] & (columns < spec.V)[None, :])


@triton.jit
def gates_base(gates, row, head, chunk, spec: tl.constexpr, per: tl.constexpr):
    """Returns the address of a chunk's cumulative gates in [rows, H, CHUNKS * CHUNK, WIDTH]; unused without gates."""
    if spec.WIDTH > 0 and not spec.CONSTANT:
        first = (tl.cast(row // per.GATES, tl.int64) * spec.H + head) * (spec.CHUNKS * spec.CHUNK) + chunk * spec.CHUNK
        return gates + first * spec.WIDTH
    else:
        return gates


@triton.jit
def load_once(at, valid, MASKED: tl.constexpr):
    """Loads a vector with one element per token, which a program reads once.

    Triton reloads a vector that is shorter than the number of threads for each layout in which it is used. After a loop
    the compiler orders such loads one after the other, each waiting for the previous one: as many round trips to L2
    (docs/lab/linear_recurrence_gpu.md). Two columns of the same elements have as many elements as threads.
    """
    same = at[:, None] + tl.arange(0, 2)[None, :] * 0
    if MASKED:
        return tl.max(tl.load(same, mask=valid[:, None] & (tl.arange(0, 2) >= 0)[None, :], other=0.0).to(tl.float32), 1)
    else:
        return tl.max(tl.load(same), 1)


@triton.jit
def constant_gate(gates, row, head, spec: tl.constexpr, per: tl.constexpr):
    """Returns the log2 gate of a head, if it is the same for all tokens; else unused."""
    if spec.CONSTANT:
        return powers_of_two(tl.load(gates + (row // per.GATES) * spec.H + head))
    else:
        return 0.0


@triton.jit
def head_gates(base, constant, row, ROWS: tl.constexpr, spec: tl.constexpr):
    """Returns [ROWS] sums of a head's gates from the chunk's first token to those from `row` on, of `gates_base`.

    After the last token its sum is repeated or, if gates are constant, continues: see `decay_until_end`.
    """
    rows = row + tl.arange(0, ROWS)
    if spec.CONSTANT:
        return constant * (rows + 1).to(tl.float32)
    else:
        return tl.load(base + rows)


@triton.jit
def last_head_gate(base, constant, tokens, spec: tl.constexpr):
    """Returns the sum of a head's gates over a chunk with `tokens` tokens, or over those after its first one."""
    if spec.CONSTANT:
        return constant * tl.minimum(tokens, spec.CHUNK).to(tl.float32)
    else:
        return tl.load(base + (spec.CHUNK - 1))


@triton.jit
def decay_until_end(total, sums, spec: tl.constexpr):
    """Returns the decay from each token to the chunk's end, at most 1: from `last_head_gate` and `head_gates`."""
    exponents = total - sums
    if spec.CONSTANT and not spec.FULL_CHUNKS:
        exponents = tl.minimum(exponents, 0.0)  # for rows past the end
    return tl.exp2(exponents)


@triton.jit
def scores_at(scores, row, head, chunk, spec: tl.constexpr):
    """Returns the addresses of a chunk's scores in [rows, H, CHUNKS * CHUNK, CHUNK]: pointers [CHUNK, CHUNK] by (i,
    j).
    """
    first = (tl.cast(row, tl.int64) * spec.H + head) * (spec.CHUNKS * spec.CHUNK) + chunk * spec.CHUNK
    rows = tl.arange(0, spec.CHUNK)
    return scores + first * spec.CHUNK + (rows[:, None] * spec.CHUNK + rows[None, :])


@triton.jit
def load_gates(base, column, COLUMNS: tl.constexpr, spec: tl.constexpr):
    """Returns [CHUNK, COLUMNS] cumulative gates per key channel."""
    rows = tl.arange(0, spec.CHUNK)
    columns = column + tl.arange(0, COLUMNS)
    # No mask on rows: `chunk_local_cumsum_kernel` fills every chunk, and repeats the last token's sum after it.
    at = base + (rows[:, None] * spec.K + columns[None, :])
    return masked_load(at, rows[:, None] >= 0, (columns < spec.K)[None, :], False, spec.K % COLUMNS != 0)


@triton.jit
def load_last_gates(base, column, COLUMNS: tl.constexpr, spec: tl.constexpr):
    """Returns [COLUMNS] cumulative gates per key channel at the end of a chunk."""
    columns = column + tl.arange(0, COLUMNS)
    # The last row is the sum up to the last token in a partial chunk too, since later rows repeat that sum.
    return tl.load(base + (spec.CHUNK - 1) * spec.K + columns, mask=columns < spec.K, other=0.0)


@triton.jit
def load_chunk_decay(totals, row, head, chunk, column, COLUMNS: tl.constexpr, spec: tl.constexpr, per: tl.constexpr):
    """Returns [COLUMNS] sums of the log2 gates of a chunk's tokens, from [rows, H, CHUNKS, K]; 0 if not DECAYED.

    For a chunk past the row's ends it returns those of the nearest one.
    """
    if spec.DECAYED:
        chunk = tl.maximum(0, tl.minimum(chunk, spec.CHUNKS - 1))
        columns = column + tl.arange(0, COLUMNS)
        at = ((tl.cast(row // per.GATES, tl.int64) * spec.H + head) * spec.CHUNKS + chunk) * spec.K
        return tl.load(totals + at + columns, mask=columns < spec.K, other=0.0)
    else:
        return 0.0


@triton.jit
def powers_of_two(gates):
    """Converts log gates to float32 log2 gates, clamped to at least -58."""
    return tl.maximum(gates.to(tl.float32) * LOG2E, MIN_LOG2_GATE)


@triton.jit
def load_dt(dt, row, start, end, head, spec: tl.constexpr, BLOCK: tl.constexpr = None):
    """Returns [BLOCK] dt of a head, of all tokens of a chunk if BLOCK is None; 0 for tokens from `end` on."""
    ROWS: tl.constexpr = spec.CHUNK if BLOCK is None else BLOCK
    rows = tl.arange(0, ROWS)
    at = chunk_base(dt, row, start, head, spec.T, spec.H, 1) + rows * spec.H
    return tl.load(at, mask=start + rows < end, other=0.0).to(tl.float32)


@triton.jit
def pair_weights(gates):
    """Returns exp2(G_i - G_j) for j <= i, else 0, of one gate per head: [tokens, tokens] by (i, j)."""
    rows = tl.arange(0, gates.shape[0])
    # Above the diagonal the exponent is positive and may overflow, and inf times a score of 0 is NaN: so the mask is
    # applied before exp2, as an exponent of -inf.
    between = tl.where(rows[:, None] >= rows[None, :], gates[:, None] - gates[None, :], float("-inf"))
    return tl.exp2(between)


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
def sub_chunk_pairs(spec: tl.constexpr):
    """Returns which pairs (i, j) with j <= i have both tokens in the same sub-chunk: [CHUNK, CHUNK]."""
    rows = tl.arange(0, spec.CHUNK)
    sub_chunk = rows // spec.SUB_CHUNK
    return (sub_chunk[:, None] == sub_chunk[None, :]) & (rows[:, None] >= rows[None, :])


@triton.jit
def pairs_of(level, spec: tl.constexpr):
    """Returns which pairs (later token, earlier token) a level's cuts separate: [CHUNK, CHUNK]."""
    rows = tl.arange(0, spec.CHUNK)
    # The highest bit in which their indices differ is the level's.
    return (((rows[:, None] ^ rows[None, :]) >> level) == 1) & (rows[:, None] > rows[None, :])


@triton.jit
def causal(spec: tl.constexpr):
    """Returns [CHUNK, CHUNK], true where token j is not after token i."""
    rows = tl.arange(0, spec.CHUNK)
    return rows[:, None] >= rows[None, :]


@triton.jit
def diagonal(spec: tl.constexpr):
    """Returns [CHUNK, CHUNK], true on the diagonal."""
    rows = tl.arange(0, spec.CHUNK)
    return rows[:, None] == rows[None, :]


@triton.jit
def opaque_zero():
    """Returns 0, which the compiler cannot fold: ptxas does not unroll a loop to a bound with it.

    Unrolled, it moves the loads of all iterations to the front: 255 registers and spills instead of 152 registers.
    """
    return tl.program_id(0) >> 30


@triton.jit
def channel_scores(read, seen, query, key, high, low, signs, DELTA: tl.constexpr, spec: tl.constexpr):
    """Returns read plus sum_k q_ik exp2(G_ik - G_jk) k_jk for j <= i, over a tile of key channels, and, if DELTA, seen
    plus the same of keys in place of queries.

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
        seen: [CHUNK, CHUNK] float32; unused unless DELTA.
        query: [CHUNK, COLUMNS].
        key: [CHUNK, COLUMNS].
        high: [CHUNK, COLUMNS], from `gate_operands`.
        low: [CHUNK, COLUMNS], likewise.
        signs: Address of the matrices of `gate_sums`.
    """
    FIRST: tl.constexpr = spec.SUB_LEVEL
    LEVELS: tl.constexpr = spec.LEVELS
    # The loop is not unrolled: unrolled levels spill (docs/lab/linear_recurrence_gpu.md, "Halving as a loop").
    for level in tl.range(FIRST, LEVELS + opaque_zero(), num_stages=1, disable_licm=True):
        decay = tl.exp2(gate_sums(signs, TO_CUT + level, high, low, spec))
        right = decayed(key, decay)
        # A product of the whole chunk, most of which the mask drops, so that all levels have one tile shape.
        read += tl.where(pairs_of(level, spec), dot(decayed(query, decay), tl.trans(right), spec), 0.0)
        if DELTA:
            seen += tl.where(pairs_of(level, spec), dot(right, tl.trans(right), spec), 0.0)
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
        if DELTA:
            seen += tl.where(sub_chunk_pairs(spec), dot(decayed(key, since), tl.trans(right), spec), 0.0)
    return read, seen
