"""Device helpers of the linear recurrence kernels: tiles of a chunk, and products of pairs with their decay."""

import triton
import triton.language as tl

from ejkernel_triton.blocks import LOG2E, dot

MIN_LOG2_GATE = tl.constexpr(-58.0)


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
def cut_weights(gates, base, column, level, COLUMNS: tl.constexpr, spec: tl.constexpr):
    """Returns the decay between a chunk's tokens i and the cut m of i's block of 2 ** (level + 1) tokens: [CHUNK,
    COLUMNS].

    The cut is the last token of the block's first half. For later tokens this is exp2(G_i - G_m), the decay since the
    cut, for earlier ones exp2(G_m - G_i), the decay up to it: no exponent is positive if no gate is.

    Args:
        gates: [CHUNK, COLUMNS] cumulative gates.
        base: Address of the gates, to load those of the cuts, which are in the cache.
        column: First column.
        level: log2 of the tokens in half a block; levels run from the largest block down.
    """
    rows = tl.arange(0, spec.CHUNK)
    cut = ((rows >> (level + 1)) << (level + 1)) + ((1 << level) - 1)
    columns = column + tl.arange(0, COLUMNS)
    at = base + (cut[:, None] * spec.K + columns[None, :])
    at_cut = masked_load(at, cut[:, None] >= 0, (columns < spec.K)[None, :], False, spec.K % COLUMNS != 0)
    later = ((rows >> level) & 1) == 1
    return tl.exp2(tl.where(later[:, None], gates - at_cut, at_cut - gates))


@triton.jit
def from_middle(gates, base, column, COLUMNS: tl.constexpr, spec: tl.constexpr):
    """Returns cumulative gates relative to the chunk's middle, and whether exp2 of all of them and their negatives
    is safe.

    Where all are within +-MAX_EXPONENT, the pairs of the chunk are one product: the factors before and after the
    middle multiply to at most 1 for pairs with j <= i, and to at most 2 ** (2 MAX_EXPONENT) for the others.
    """
    columns = column + tl.arange(0, COLUMNS)
    middle = tl.load(base + (spec.CHUNK // 2 - 1) * spec.K + columns, mask=columns < spec.K, other=0.0)
    # Relative to the middle, not the first token: exponents are then at most half as large.
    relative = gates - middle[None, :]
    # A maximum over the whole tile, so that the branch on it is uniform in a program.
    return relative, tl.max(tl.max(tl.abs(relative), 1), 0) < spec.MAX_EXPONENT


@triton.jit
def pairs_of(level, spec: tl.constexpr):
    """Returns which pairs (later token, earlier token) a level's cuts separate: [CHUNK, CHUNK]."""
    # Counted in half blocks: the later token's index is odd, and the earlier token's is the one before it.
    half = tl.arange(0, spec.CHUNK) >> level
    return (half[:, None] == half[None, :] + 1) & ((half & 1) == 1)[:, None]


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
def channel_scores(scores, query, key, gates, base, column, COLUMNS: tl.constexpr, spec: tl.constexpr):
    """Returns scores plus sum_k q_ik exp2(G_ik - G_jk) k_jk for j <= i, over a tile of key channels.

    If gates are weak, as in trained models, this is one product with factors relative to the chunk's middle.

    Otherwise the chunk is halved recursively, six times if it has 64 tokens. The cut m of exactly one halving (level)
    separates each pair, and exp2(G_i - G_m) exp2(G_m - G_j) has one factor per token, neither of which can overflow. So
    a level is one product of the whole chunk, of which only the pairs that it separates are used.

           j ->
        i  0
        |  1 0             0: a token with itself, no gate
        v  2 2 0           n: pairs that the cut of a block of 2 n tokens separates
           2 2 1 0
           4 4 4 4 0
           4 4 4 4 1 0
           4 4 4 4 2 2 0
           4 4 4 4 2 2 1 0

    Args:
        scores: [CHUNK, CHUNK] float32, by (i, j).
        query: [CHUNK, COLUMNS] of the later tokens.
        key: [CHUNK, COLUMNS] of the earlier tokens.
        gates: [CHUNK, COLUMNS] cumulative gates, in powers of two.
        base: Address of the chunk's gates.
        column: First key channel.
    """
    relative, weak = from_middle(gates, base, column, COLUMNS, spec)
    if weak:
        # Rounded to the operands' dtype after the product with the factor, for the tensor cores; sums are float32.
        left = (query.to(tl.float32) * tl.exp2(relative)).to(query.dtype)
        right = (key.to(tl.float32) * tl.exp2(-relative)).to(key.dtype)
        # Masked after the product: pairs above the diagonal are large there, up to 2 ** (2 MAX_EXPONENT), but finite.
        scores += tl.where(causal(spec), dot(left, tl.trans(right), spec), 0.0)
    else:
        q, k = query.to(tl.float32), key.to(tl.float32)
        scores += tl.where(diagonal(spec), tl.sum(q * k, 1)[:, None], 0.0)
        LEVELS: tl.constexpr = spec.LEVELS
        # The loop is not unrolled: unrolled levels spill (docs/lab/linear_recurrence_gpu.md, "Halving as a loop").
        for level in tl.range(0, LEVELS, num_stages=1):
            weights = cut_weights(gates, base, column, level, COLUMNS, spec)
            # A product of the whole chunk, most of which the mask drops, so that all levels have one tile shape. The
            # factors of other levels' pairs are at most 1 too, so none of them is inf or NaN.
            products = dot((q * weights).to(query.dtype), tl.trans((k * weights).to(key.dtype)), spec)
            scores += tl.where(pairs_of(level, spec), products, 0.0)
    return scores
