"""Device helpers of the linear recurrence kernels: tiles of a chunk, and products of pairs with their decay."""

import triton
import triton.language as tl

from ejkernel_triton.blocks import LOG2E, dot

MIN_LOG2_GATE = tl.constexpr(-58.0)


@triton.jit
def chunk_start_and_sequence_end(chunk_starts, sequence_ends, row, chunk, spec: tl.constexpr, per: tl.constexpr):
    """Returns the first token of a chunk, and the end of its sequence."""
    if spec.CHUNKS_PER_SEGMENT == 0:
        # Packed sequences are split into chunks separately, so a chunk has tokens of one sequence only. A program needs
        # these two indices before anything else, so they are precomputed for all chunks.
        return (
            tl.load(chunk_starts + (row // per.CHUNK_STARTS) * spec.NUM_CHUNKS + chunk),
            tl.load(sequence_ends + (row // per.SEQUENCE_ENDS) * spec.NUM_CHUNKS + chunk),
        )
    else:
        return chunk * spec.CHUNK_SIZE, chunk * 0 + spec.T


@triton.jit
def load_sequence_bounds(padded_cu_seqlens, chunk_offsets, row, sequence, spec: tl.constexpr, per: tl.constexpr):
    """Returns a sequence's or segment's first chunk and the one after its last, its first token and the end of its
    tokens.
    """
    if spec.CHUNKS_PER_SEGMENT == 0:
        chunk_offsets += (row // per.CHUNK_OFFSETS) * (spec.NUM_SEQUENCES + 1) + sequence
        padded_cu_seqlens += (row // per.PADDED_CU_SEQLENS) * (spec.NUM_SEQUENCES + 2) + sequence
        return (
            tl.load(chunk_offsets),
            tl.load(chunk_offsets + 1),
            tl.load(padded_cu_seqlens),
            tl.load(padded_cu_seqlens + 1),
        )
    else:
        first_chunk = sequence * spec.CHUNKS_PER_SEGMENT
        return (
            first_chunk,
            tl.minimum(first_chunk + spec.CHUNKS_PER_SEGMENT, spec.NUM_CHUNKS),
            first_chunk * spec.CHUNK_SIZE,
            first_chunk * 0 + spec.T,
        )


@triton.jit
def sequence_index_of_scan(sequences_by_length, row, scan_index, spec: tl.constexpr, per: tl.constexpr):
    """Returns the index of the sequence or segment of scan `scan_index` of a row."""
    if spec.CHUNKS_PER_SEGMENT == 0:
        return tl.load(sequences_by_length + (row // per.SEQUENCES_BY_LENGTH) * spec.NUM_SEQUENCES + scan_index)
    else:
        return scan_index


@triton.jit
def masked_load(at, rows, columns, MASK_ROWS: tl.constexpr, MASK_COLUMNS: tl.constexpr):
    """Loads a tile from the addresses `at`; 0 in the rows that are not in `rows` if MASK_ROWS; the same for columns."""
    # A mask costs time even if it is always true, so there are four loads instead of one with constant masks.
    if MASK_ROWS:
        if MASK_COLUMNS:
            return tl.load(at, mask=rows & columns, other=0.0)
        else:
            return tl.load(at, mask=rows, other=0.0)
    else:
        if MASK_COLUMNS:
            return tl.load(at, mask=columns, other=0.0)
        else:
            return tl.load(at)


@triton.jit
def chunk_address(base, row, start, head, T: tl.constexpr, NUM_HEADS: tl.constexpr, WIDTH: tl.constexpr):
    """Returns the address of a head's first token of a chunk in [rows, T, NUM_HEADS, GATE_CHANNELS]."""
    # The tile's address has 64 bits, offsets within it 32: 64-bit offsets of elements take registers.
    return base + ((tl.cast(row, tl.int64) * T + start) * NUM_HEADS + head) * WIDTH


@triton.jit
def load_token_rows(
    base,
    start,
    end,
    column,
    NUM_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    spec: tl.constexpr,
    BLOCK: tl.constexpr = None,
):
    """Loads [BLOCK, COLUMNS] of a chunk's tokens from `chunk_address` on, all if BLOCK is None; 0 for tokens from `end`
    on.
    """
    ROWS: tl.constexpr = spec.CHUNK_SIZE if BLOCK is None else BLOCK
    rows = tl.arange(0, ROWS)
    columns = column + tl.arange(0, COLUMNS)
    at = base + (rows[:, None] * (NUM_HEADS * WIDTH) + columns[None, :])
    valid = (start + rows < end)[:, None]
    return masked_load(at, valid, (columns < WIDTH)[None, :], not spec.ALL_CHUNKS_FULL, WIDTH % COLUMNS != 0)


@triton.jit
def load_transposed_token_rows(
    base,
    start,
    end,
    column,
    NUM_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    spec: tl.constexpr,
):
    """Returns `load_token_rows` transposed, [COLUMNS, CHUNK_SIZE]."""
    rows = tl.arange(0, spec.CHUNK_SIZE)
    columns = column + tl.arange(0, COLUMNS)
    # Addresses are transposed, not the tile in registers. Triton assigns lanes along the contiguous axis, which is the
    # first one here, so a warp still reads whole rows of memory.
    at = base + (rows[None, :] * (NUM_HEADS * WIDTH) + columns[:, None])
    valid = (start + rows < end)[None, :]
    return masked_load(at, valid, (columns < WIDTH)[:, None], not spec.ALL_CHUNKS_FULL, WIDTH % COLUMNS != 0)


@triton.jit
def store_token_rows(
    base,
    tile,
    start,
    end,
    column,
    NUM_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    spec: tl.constexpr,
):
    """Stores a tile to the addresses that `load_token_rows` reads."""
    rows = tl.arange(0, tile.shape[0])
    columns = column + tl.arange(0, tile.shape[1])
    at = base + (rows[:, None] * (NUM_HEADS * WIDTH) + columns[None, :])
    valid = (start + rows < end)[:, None] & (columns < WIDTH)[None, :]
    tl.store(at, tile.to(base.dtype.element_ty), mask=valid)


@triton.jit
def state_address(states, row, head, chunk, spec: tl.constexpr):
    """Returns the address of a chunk's state in [rows, H, NUM_CHUNKS, K, V]."""
    return states + ((tl.cast(row, tl.int64) * spec.H + head) * spec.NUM_CHUNKS + chunk) * (spec.K * spec.V)


@triton.jit
def load_state(base, key_start, value_start, ROWS: tl.constexpr, COLUMNS: tl.constexpr, spec: tl.constexpr):
    """Returns [ROWS, COLUMNS] of a state from key channel k and value channel v on."""
    rows = key_start + tl.arange(0, ROWS)
    columns = value_start + tl.arange(0, COLUMNS)
    at = base + (rows[:, None] * spec.V + columns[None, :])
    return masked_load(
        at, (rows < spec.K)[:, None], (columns < spec.V)[None, :], spec.K % ROWS != 0, spec.V % COLUMNS != 0
    )


@triton.jit
def store_state(base, tile, key_start, value_start, spec: tl.constexpr):
    """Stores a tile of a state."""
    rows = key_start + tl.arange(0, tile.shape[0])
    columns = value_start + tl.arange(0, tile.shape[1])
    at = base + (rows[:, None] * spec.V + columns[None, :])
    tl.store(at, tile.to(base.dtype.element_ty), mask=(rows < spec.K)[:, None] & (columns < spec.V)[None, :])


@triton.jit
def gates_address(gates, row, head, chunk, spec: tl.constexpr, per: tl.constexpr):
    """Returns the address of a chunk's cumulative gates in [rows, H, NUM_CHUNKS * CHUNK_SIZE, GATE_CHANNELS]; unused
    without gates.
    """
    if spec.GATE_CHANNELS > 0 and not spec.HAS_CONSTANT_GATES:
        first = (tl.cast(row // per.GATES, tl.int64) * spec.H + head) * (
            spec.NUM_CHUNKS * spec.CHUNK_SIZE
        ) + chunk * spec.CHUNK_SIZE
        return gates + first * spec.GATE_CHANNELS
    else:
        return gates


@triton.jit
def load_vector_as_two_columns(vector_pointers, valid, IS_MASKED: tl.constexpr):
    """Loads a vector with one element per token, which a program reads once.

    Triton reloads a vector that is shorter than the number of threads for each layout in which it is used. After a loop
    the compiler orders such loads one after the other, each waiting for the previous one: as many round trips to L2
    (docs/lab/linear_recurrence_gpu.md). Two columns of the same elements have as many elements as threads.
    """
    pointers = vector_pointers[:, None] + tl.arange(0, 2)[None, :] * 0
    if IS_MASKED:
        return tl.max(
            tl.load(pointers, mask=valid[:, None] & (tl.arange(0, 2) >= 0)[None, :], other=0.0).to(tl.float32), 1
        )
    else:
        return tl.max(tl.load(pointers), 1)


@triton.jit
def load_constant_gate(gates, row, head, spec: tl.constexpr, per: tl.constexpr):
    """Returns the log2 gate of a head, if it is the same for all tokens; else unused."""
    if spec.HAS_CONSTANT_GATES:
        return to_clamped_log2_gates(tl.load(gates + (row // per.GATES) * spec.H + head))
    else:
        return 0.0


@triton.jit
def load_head_gate_cumsum(gates_base, constant_log2_gate, first_row, NUM_ROWS: tl.constexpr, spec: tl.constexpr):
    """Returns [NUM_ROWS] sums of a head's gates from the chunk's first token to those from `first_row` on, of
    `gates_address`.

    After the last token its sum is repeated or, if gates are constant, continues: see `decay_to_chunk_end`.
    """
    rows = first_row + tl.arange(0, NUM_ROWS)
    if spec.HAS_CONSTANT_GATES:
        return constant_log2_gate * (rows + 1).to(tl.float32)
    else:
        return tl.load(gates_base + rows)


@triton.jit
def load_head_gate_sum(gates_base, constant_log2_gate, num_tokens, spec: tl.constexpr):
    """Returns the sum of a head's gates over a chunk with `num_tokens` tokens, or over those after its first one."""
    if spec.HAS_CONSTANT_GATES:
        return constant_log2_gate * tl.minimum(num_tokens, spec.CHUNK_SIZE).to(tl.float32)
    else:
        return tl.load(gates_base + (spec.CHUNK_SIZE - 1))


@triton.jit
def decay_to_chunk_end(gate_sum, gate_cumsum, spec: tl.constexpr):
    """Returns the decay from each token to the chunk's end, at most 1: from `load_head_gate_sum` and
    `load_head_gate_cumsum`.
    """
    log2_decay = gate_sum - gate_cumsum
    if spec.HAS_CONSTANT_GATES and not spec.ALL_CHUNKS_FULL:
        log2_decay = tl.minimum(log2_decay, 0.0)  # for rows past the end
    return tl.exp2(log2_decay)


@triton.jit
def score_pointers(scores, row, head, chunk, spec: tl.constexpr):
    """Returns the addresses of a chunk's scores in [rows, H, NUM_CHUNKS * CHUNK_SIZE, CHUNK_SIZE]: pointers
    [CHUNK_SIZE, CHUNK_SIZE] by (i, j).
    """
    first = (tl.cast(row, tl.int64) * spec.H + head) * (spec.NUM_CHUNKS * spec.CHUNK_SIZE) + chunk * spec.CHUNK_SIZE
    rows = tl.arange(0, spec.CHUNK_SIZE)
    return scores + first * spec.CHUNK_SIZE + (rows[:, None] * spec.CHUNK_SIZE + rows[None, :])


@triton.jit
def load_channel_gate_cumsum(base, column, COLUMNS: tl.constexpr, spec: tl.constexpr):
    """Returns [CHUNK_SIZE, COLUMNS] cumulative gates per key channel."""
    rows = tl.arange(0, spec.CHUNK_SIZE)
    columns = column + tl.arange(0, COLUMNS)
    # No mask on rows: `chunk_local_cumsum_kernel` fills every chunk, and repeats the last token's sum after it.
    at = base + (rows[:, None] * spec.K + columns[None, :])
    return masked_load(at, rows[:, None] >= 0, (columns < spec.K)[None, :], False, spec.K % COLUMNS != 0)


@triton.jit
def load_channel_gate_sum(base, column, COLUMNS: tl.constexpr, spec: tl.constexpr):
    """Returns [COLUMNS] cumulative gates per key channel at the end of a chunk."""
    columns = column + tl.arange(0, COLUMNS)
    # The last row is the sum up to the last token in a partial chunk too, since later rows repeat that sum.
    return tl.load(base + (spec.CHUNK_SIZE - 1) * spec.K + columns, mask=columns < spec.K, other=0.0)


@triton.jit
def load_log2_chunk_decay(
    chunk_gate_sums, row, head, chunk, column, COLUMNS: tl.constexpr, spec: tl.constexpr, per: tl.constexpr
):
    """Returns [COLUMNS] sums of the log2 gates of a chunk's tokens, from [rows, H, NUM_CHUNKS, K]; 0 if not
    QK_ARE_DECAYED.

    For a chunk past the row's ends it returns those of the nearest one.
    """
    if spec.QK_ARE_DECAYED:
        chunk = tl.maximum(0, tl.minimum(chunk, spec.NUM_CHUNKS - 1))
        columns = column + tl.arange(0, COLUMNS)
        at = ((tl.cast(row // per.GATES, tl.int64) * spec.H + head) * spec.NUM_CHUNKS + chunk) * spec.K
        return tl.load(chunk_gate_sums + at + columns, mask=columns < spec.K, other=0.0)
    else:
        return 0.0


@triton.jit
def to_clamped_log2_gates(gates):
    """Converts log gates to float32 log2 gates, clamped to at least -58."""
    return tl.maximum(gates.to(tl.float32) * LOG2E, MIN_LOG2_GATE)


@triton.jit
def load_token_scalars(array, row, start, end, head, spec: tl.constexpr, BLOCK: tl.constexpr = None):
    """Returns [BLOCK] dt of a head, of all tokens of a chunk if BLOCK is None; 0 for tokens from `end` on."""
    ROWS: tl.constexpr = spec.CHUNK_SIZE if BLOCK is None else BLOCK
    rows = tl.arange(0, ROWS)
    at = chunk_address(array, row, start, head, spec.T, spec.H, 1) + rows * spec.H
    return tl.load(at, mask=start + rows < end, other=0.0).to(tl.float32)


@triton.jit
def pairwise_decay(gate_cumsum):
    """Returns exp2(G_i - G_j) for j <= i, else 0, of one gate per head: [tokens, tokens] by (i, j)."""
    rows = tl.arange(0, gate_cumsum.shape[0])
    # Above the diagonal the exponent is positive and may overflow, and inf times a score of 0 is NaN: so the mask is
    # applied before exp2, as an exponent of -inf.
    log2_decay = tl.where(rows[:, None] >= rows[None, :], gate_cumsum[:, None] - gate_cumsum[None, :], float("-inf"))
    return tl.exp2(log2_decay)


@triton.jit
def midpoint_decay(gate_cumsum, gates_base, column, level, COLUMNS: tl.constexpr, spec: tl.constexpr):
    """Returns the decay between a chunk's tokens i and the midpoint m of i's block of 2 ** (level + 1) tokens:
    [CHUNK_SIZE, COLUMNS].

    The cut is the last token of the block's first half. For later tokens this is exp2(G_i - G_m), the decay since the
    cut, for earlier ones exp2(G_m - G_i), the decay up to it: no exponent is positive if no gate is.

    Args:
        gate_cumsum: [CHUNK_SIZE, COLUMNS] cumulative gates.
        gates_base: Address of the gates, to load those of the cuts, which are in the cache.
        column: First column.
        level: log2 of the tokens in half a block; levels run from the largest block down.
    """
    rows = tl.arange(0, spec.CHUNK_SIZE)
    midpoint = ((rows >> (level + 1)) << (level + 1)) + ((1 << level) - 1)
    columns = column + tl.arange(0, COLUMNS)
    at = gates_base + (midpoint[:, None] * spec.K + columns[None, :])
    midpoint_gates = masked_load(at, midpoint[:, None] >= 0, (columns < spec.K)[None, :], False, spec.K % COLUMNS != 0)
    in_second_half = ((rows >> level) & 1) == 1
    return tl.exp2(tl.where(in_second_half[:, None], gate_cumsum - midpoint_gates, midpoint_gates - gate_cumsum))


@triton.jit
def gates_relative_to_middle(gate_cumsum, gates_base, column, COLUMNS: tl.constexpr, spec: tl.constexpr):
    """Returns cumulative gates relative to the chunk's middle, and whether exp2 of all of them and their negatives
    is safe.

    Where all are within +-MAX_LOG2_DECAY_FROM_MIDDLE, the pairs of the chunk are one product: the factors before and
    after the middle multiply to at most 1 for pairs with j <= i, and to at most 2 ** (2 MAX_LOG2_DECAY_FROM_MIDDLE) for
    the others.
    """
    columns = column + tl.arange(0, COLUMNS)
    middle_gates = tl.load(gates_base + (spec.CHUNK_SIZE // 2 - 1) * spec.K + columns, mask=columns < spec.K, other=0.0)
    # Relative to the middle, not the first token: exponents are then at most half as large.
    relative_gates = gate_cumsum - middle_gates[None, :]
    # A maximum over the whole tile, so that the branch on it is uniform in a program.
    return relative_gates, tl.max(tl.max(tl.abs(relative_gates), 1), 0) < spec.MAX_LOG2_DECAY_FROM_MIDDLE


@triton.jit
def half_block_pair_mask(level, spec: tl.constexpr):
    """Returns which pairs (later token, earlier token) a level's cuts separate: [CHUNK_SIZE, CHUNK_SIZE]."""
    # Counted in half blocks: the later token's index is odd, and the earlier token's is the one before it.
    half_block = tl.arange(0, spec.CHUNK_SIZE) >> level
    return (half_block[:, None] == half_block[None, :] + 1) & ((half_block & 1) == 1)[:, None]


@triton.jit
def causal_mask(spec: tl.constexpr):
    """Returns [CHUNK_SIZE, CHUNK_SIZE], true where token j is not after token i."""
    rows = tl.arange(0, spec.CHUNK_SIZE)
    return rows[:, None] >= rows[None, :]


@triton.jit
def diagonal_mask(spec: tl.constexpr):
    """Returns [CHUNK_SIZE, CHUNK_SIZE], true on the diagonal."""
    rows = tl.arange(0, spec.CHUNK_SIZE)
    return rows[:, None] == rows[None, :]


@triton.jit
def add_channel_gated_scores(
    scores, query, key, gate_cumsum, gates_base, column, COLUMNS: tl.constexpr, spec: tl.constexpr
):
    """Returns scores plus sum_k q_ik exp2(G_ik - G_jk) k_jk for j <= i, over a tile of key channels.

    If gates are weak, as in trained models, this is one product with factors relative to the chunk's middle.

    Otherwise the chunk is halved recursively, six times if it has 64 tokens. The midpoint m of exactly one halving
    (level) separates each pair, and exp2(G_i - G_m) exp2(G_m - G_j) has one factor per token, neither of which can
    overflow. So a level is one product of the whole chunk, of which only the pairs that it separates are used.

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
        scores: [CHUNK_SIZE, CHUNK_SIZE] float32, by (i, j).
        query: [CHUNK_SIZE, COLUMNS] of the later tokens.
        key: [CHUNK_SIZE, COLUMNS] of the earlier tokens.
        gate_cumsum: [CHUNK_SIZE, COLUMNS] cumulative gates, in powers of two.
        gates_base: Address of the chunk's gates.
        column: First key channel.
    """
    relative_gates, factors_fit = gates_relative_to_middle(gate_cumsum, gates_base, column, COLUMNS, spec)
    if factors_fit:
        # Rounded to the operands' dtype after the product with the factor, for the tensor cores; sums are float32.
        decayed_query = (query.to(tl.float32) * tl.exp2(relative_gates)).to(query.dtype)
        decayed_key = (key.to(tl.float32) * tl.exp2(-relative_gates)).to(key.dtype)
        # Masked after the product: pairs above the diagonal are large there, but finite: up to
        # 2 ** (2 MAX_LOG2_DECAY_FROM_MIDDLE).
        scores += tl.where(causal_mask(spec), dot(decayed_query, tl.trans(decayed_key), spec), 0.0)
    else:
        q, k = query.to(tl.float32), key.to(tl.float32)
        scores += tl.where(diagonal_mask(spec), tl.sum(q * k, 1)[:, None], 0.0)
        LEVELS: tl.constexpr = spec.LOG2_CHUNK
        # The loop is not unrolled: unrolled levels spill (docs/lab/linear_recurrence_gpu.md, "Halving as a loop").
        for level in tl.range(0, LEVELS, num_stages=1):
            decay = midpoint_decay(gate_cumsum, gates_base, column, level, COLUMNS, spec)
            # A product of the whole chunk, most of which the mask drops, so that all levels have one tile shape. The
            # factors of other levels' pairs are at most 1 too, so none of them is inf or NaN.
            products = dot((q * decay).to(query.dtype), tl.trans((k * decay).to(key.dtype)), spec)
            scores += tl.where(half_block_pair_mask(level, spec), products, 0.0)
    return scores
