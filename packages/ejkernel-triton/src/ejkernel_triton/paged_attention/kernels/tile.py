"""Device helpers for one tile of paged attention: loading queries and pages, scores, and storing rows."""

import triton
import triton.language as tl

from ejkernel_triton.blocks import (
    LN2,
    LOG2E,
    batch_row_address,
    convert_to_dtype,
    minus_inf_to_zero,
    round_bfloat16,
    tanh,
)

# Fields of a work entry.
SEQUENCE_FIELD = tl.constexpr(0)
FIRST_ROW_FIELD = tl.constexpr(1)
NUM_ROWS_FIELD = tl.constexpr(2)
FIRST_POSITION_FIELD = tl.constexpr(3)
CONTEXT_LEN_FIELD = tl.constexpr(4)
KEY_START_FIELD = tl.constexpr(5)
KEY_END_FIELD = tl.constexpr(6)
FIRST_KEY_TILE_FIELD = tl.constexpr(7)
NUM_KEY_TILES_FIELD = tl.constexpr(8)
FIELDS_PER_ENTRY = tl.constexpr(9)


@triton.jit
def round_to_compute_dtype(x, spec: tl.constexpr):
    """Returns a tile rounded to `compute_dtype`, to nearest with ties to even; unchanged without `compute_dtype`."""
    # Rounds explicitly, since the interpreter's cast truncates.
    if spec.COMPUTE_DTYPE == "bfloat16":
        x = round_bfloat16(x.to(tl.float32))
    if spec.COMPUTE_DTYPE == "float16":
        x = x.to(tl.float16)
    if spec.CACHE_ITEMSIZE == 1:
        # Triton's interpreter converts integers to the bits of bfloat16.
        x = x.to(tl.float32)
    return x


@triton.jit
def to_qk_dtype(x, spec: tl.constexpr):
    """Returns a tile of queries or keys, converted to the dtype in which queries and keys are multiplied."""
    DTYPE: tl.constexpr = spec.QK_DTYPE  # Triton 3.6 takes no field of a string as an argument
    return convert_to_dtype(round_to_compute_dtype(x, spec), DTYPE)


@triton.jit
def to_pv_dtype(x, spec: tl.constexpr):
    """Returns a tile of values, converted to the dtype in which weights and values are multiplied."""
    DTYPE: tl.constexpr = spec.PV_DTYPE  # Triton 3.6 takes no field of a string as an argument
    return convert_to_dtype(round_to_compute_dtype(x, spec), DTYPE)


@triton.jit
def load_queries(query, first_row, num_rows, head, spec: tl.constexpr):
    """Loads the queries of an entry's rows and one tile of heads; row m is query row m // G of head m % G.

    Returns:
        [M, BD], all columns or those that are multiplied with a latent vector, and [M, BR], the rotary columns.
    """
    m = tl.arange(0, spec.M)
    d = tl.arange(0, spec.BD)
    r = tl.arange(0, spec.BLOCK_ROTARY)
    # All query heads of a KV head are rows of one tile, so a key tile is loaded once for all of them. Padding rows and
    # columns are 0.
    at = tl.cast((first_row + m // spec.G) * spec.H + head * spec.G + m % spec.G, tl.int64)[:, None] * spec.D
    mask = (m < num_rows * spec.G)[:, None]
    q = tl.load(query + at + d[None, :], mask=mask & (d < spec.D - spec.ROTARY_DIM)[None, :], other=0.0)
    q_rotary = tl.load(
        query + at + (spec.LATENT_DIM + r)[None, :], mask=mask & (r < spec.ROTARY_DIM)[None, :], other=0.0
    )
    return q, q_rotary


@triton.jit
def load_page_indices(block_tables, sequence, tile, k, valid, spec: tl.constexpr):
    """Returns the page of every key of a tile, or of the whole tile if TILE_IS_WITHIN_PAGE, and the mask of keys in the
    sequence.

    A table entry that is no valid page index is padding.
    """
    if spec.PAGES_PER_SEQUENCE == 0:
        return sequence, valid & (k < spec.PAGE_SIZE)
    elif spec.TILE_IS_WITHIN_PAGE:
        page_in_sequence = tile * spec.BLOCK_KV // spec.PAGE_SIZE
        # The last tile may start past the table's end.
        page = tl.load(
            block_tables + sequence * spec.PAGES_PER_SEQUENCE + page_in_sequence,
            mask=page_in_sequence < spec.PAGES_PER_SEQUENCE,
            other=-1,
        )
        is_valid_page = (page >= 0) & (page < spec.NUM_PAGES)
        # Triton's interpreter converts the & of a boolean vector and a scalar to integers.
        return tl.where(is_valid_page, page, 0), valid & (tl.zeros_like(k) + tl.where(is_valid_page, 1, 0) > 0)
    else:
        page_in_sequence = k // spec.PAGE_SIZE
        valid = valid & (page_in_sequence < spec.PAGES_PER_SEQUENCE)
        page = tl.load(block_tables + sequence * spec.PAGES_PER_SEQUENCE + page_in_sequence, mask=valid, other=-1)
        valid = valid & (page >= 0) & (page < spec.NUM_PAGES)
        return tl.where(valid, page, 0), valid


@triton.jit
def load_cache_rows(
    head_base,
    page,
    tile,
    k,
    valid,
    columns,
    column_mask,
    IS_VALUE: tl.constexpr,
    spec: tl.constexpr,
):
    """Loads columns of a tile's rows of one head's keys or, if IS_VALUE, of its values; 0 where `valid` is false."""
    page_stride: tl.constexpr = spec.VALUE_STRIDES[0] if IS_VALUE else spec.KEY_STRIDES[0]
    slot_stride: tl.constexpr = spec.VALUE_STRIDES[1] if IS_VALUE else spec.KEY_STRIDES[1]
    # 64 bits: a cache may have more than 2 ** 31 elements.
    page = tl.cast(page, tl.int64)
    if spec.TILE_IS_WITHIN_PAGE:
        # Page indices per key would take one pipeline stage, and registers for pointers. With one page index per tile,
        # all stages hold tiles.
        slot = tile * spec.BLOCK_KV if spec.PAGES_PER_SEQUENCE == 0 else tile * spec.BLOCK_KV % spec.PAGE_SIZE
        tile_base = head_base + page * page_stride + tl.cast(slot, tl.int64) * slot_stride
        rows = tile_base + tl.arange(0, spec.BLOCK_KV) * slot_stride
        return tl.load(rows[:, None] + columns[None, :], mask=valid[:, None] & column_mask[None, :], other=0.0)
    else:
        at = page * page_stride + tl.where(valid, k % spec.PAGE_SIZE, 0) * slot_stride
        return tl.load(
            head_base + at[:, None] + columns[None, :], mask=valid[:, None] & column_mask[None, :], other=0.0
        )


@triton.jit
def load_positions_and_contexts(entry_address, positions, first_row, num_rows, m, spec: tl.constexpr):
    """Returns positions and contexts of an entry's query rows m.

    Both are scalars, of the entry's first row, if its rows are consecutive tokens of one sequence; `positions_of_rows`
    continues them. If they are of several sequences, both are [M].
    """
    if spec.LOAD_ROW_POSITIONS:
        mask = m < num_rows * spec.G
        at = positions + tl.cast(first_row + m // spec.G, tl.int64) * 2
        return tl.load(at, mask=mask, other=-1), tl.load(at + 1, mask=mask, other=0)
    else:
        return tl.load(entry_address + FIRST_POSITION_FIELD), tl.load(entry_address + CONTEXT_LEN_FIELD)


@triton.jit
def positions_of_rows(position, m, spec: tl.constexpr):
    """Returns the position of query rows m, from what `load_positions_and_contexts` returns."""
    if spec.LOAD_ROW_POSITIONS:
        return position
    else:
        return position + m // spec.G


@triton.jit
def compute_log2_scores(
    products,
    k,
    position,
    context_len,
    m,
    alibi_slopes,
    qq_bias,
    num_qq_bias_rows,
    HAS_QQ_BIAS: tl.constexpr,
    spec: tl.constexpr,
):
    """Returns scores [M, BLOCK_KV] in base 2, from products of queries and keys. HAS_QQ_BIAS says whether some of the
    keys may be new tokens, which have biases.
    """
    scores = products * spec.SCORE_SCALE
    if spec.SCORES_ARE_ONLY_SCALED:
        return scores
    else:
        if spec.HAS_ALIBI:
            # The distance is counted from the first new token, as in the family's formula; another origin would change
            # lse and the weight of a sink.
            if spec.LOAD_ROW_POSITIONS:
                scores += alibi_slopes[:, None] * (k[None, :] - context_len[:, None]).to(tl.float32)
            else:
                scores += alibi_slopes[:, None] * (k - context_len).to(tl.float32)[None, :]
        if HAS_QQ_BIAS:
            row = position + m // spec.G - context_len
            column = k - context_len
            # The bias applies to pairs of new tokens only, such as the mask of a draft tree.
            in_range = ((row >= 0) & (row < num_qq_bias_rows))[:, None] & ((column >= 0) & (column < num_qq_bias_rows))[
                None, :
            ]
            index = row[:, None] * num_qq_bias_rows + column[None, :]
            scores += tl.load(qq_bias + index, mask=in_range, other=0.0).to(tl.float32)
        if spec.SOFT_CAP is not None:
            capped_scores = spec.SOFT_CAP * tanh(scores * (1.0 / spec.SOFT_CAP), spec.USES_FAST_TANH)
            # tanh(-inf) is -1, so pairs that a bias of -inf masks must be masked again.
            scores = tl.where(scores == float("-inf"), scores, capped_scores) if HAS_QQ_BIAS else capped_scores
        return scores * LOG2E


@triton.jit
def load_alibi_slopes(alibi_slopes, head, spec: tl.constexpr):
    """Returns slopes [M] of an item's rows."""
    M: tl.constexpr = spec.M
    m = tl.arange(0, M)
    if spec.HAS_ALIBI:
        return tl.load(alibi_slopes + head * spec.G + m % spec.G).to(tl.float32)
    else:
        return tl.zeros([M], tl.float32)


@triton.jit
def store_output_rows(
    output, lse, acc, rotary_acc, row_max, row_sum, first_row, num_rows, head, sinks, m, spec: tl.constexpr
):
    """The epilogue: adds the sink to the denominator, normalises, and stores rows m of an item's output and lse.

    `rotary_acc` holds the value columns after those of `acc`, if any.
    """
    mask = m < num_rows * spec.G
    shared_max = minus_inf_to_zero(row_max)
    output_scale = tl.full(m.shape, 1.0, tl.float32)
    if spec.HAS_SINKS:
        # The sink may exceed every score, so it joins the maximum as well as the denominator. It has no value.
        sink = tl.load(sinks + head * spec.G + m % spec.G) * LOG2E
        shared_max = minus_inf_to_zero(tl.maximum(row_max, sink))
        output_scale = tl.exp2(row_max - shared_max)
        row_sum = row_sum * output_scale + tl.exp2(sink - shared_max)
    denominator = tl.where(row_sum > 0.0, row_sum, 1.0)
    row_index = tl.cast((first_row + m // spec.G) * spec.H + head * spec.G + m % spec.G, tl.int64)
    # A row without keys: output 0 and lse -inf.
    tl.store(
        lse + row_index, tl.where(row_sum > 0.0, (tl.log2(denominator) + shared_max) * LN2, float("-inf")), mask=mask
    )
    output_scale = (output_scale * spec.VALUE_SCALE / denominator)[:, None]
    dv = tl.arange(0, spec.BV)
    offsets = row_index[:, None] * spec.DV + dv[None, :]
    acc_width = spec.LATENT_DIM if spec.ROTARY_IS_VALUE else spec.DV
    # Padding columns, and the rotary ones of `rotary_acc`, are not stored here.
    tl.store(
        output + offsets,
        (acc * output_scale).to(output.dtype.element_ty),
        mask=mask[:, None] & (dv < acc_width)[None, :],
    )
    if spec.ROTARY_IS_VALUE:
        r = tl.arange(0, spec.BLOCK_ROTARY)
        offsets = row_index[:, None] * spec.DV + (spec.LATENT_DIM + r)[None, :]
        in_range = mask[:, None] & (r < spec.ROTARY_DIM)[None, :]
        tl.store(output + offsets, (rotary_acc * output_scale).to(output.dtype.element_ty), mask=in_range)


@triton.jit
def store_partial_acc(partial_accs, slot, acc, rotary_acc, spec: tl.constexpr):
    """Stores unnormalised values of rows in their slots, [PARTIAL_ACC_WIDTH] each: those of `acc`, then those of
    `rotary_acc`.
    """
    PARTIAL_ACC_WIDTH: tl.constexpr = spec.BV + (spec.BLOCK_ROTARY if spec.ROTARY_IS_VALUE else 0)
    tl.store(partial_accs + slot[:, None] * PARTIAL_ACC_WIDTH + tl.arange(0, spec.BV)[None, :], acc)
    if spec.ROTARY_IS_VALUE:
        tl.store(
            partial_accs + slot[:, None] * PARTIAL_ACC_WIDTH + (spec.BV + tl.arange(0, spec.BLOCK_ROTARY))[None, :],
            rotary_acc,
        )


@triton.jit
def offset_to_batch_row(work_list, program_shares, sinks, batch, spec: tl.constexpr, per: tl.constexpr):
    """Returns the work list, the programs' shares and the sinks of a batch row."""
    work_list = batch_row_address(work_list, batch, per.WORK_LIST, spec.NUM_ENTRIES * FIELDS_PER_ENTRY)
    program_shares = batch_row_address(program_shares, batch, per.PROGRAM_SHARES, (spec.NUM_PROGRAMS + 1) * 2)
    if spec.HAS_SINKS:
        sinks = batch_row_address(sinks, batch, per.SINKS, spec.H)
    return work_list, program_shares, sinks
