"""Device helpers for one tile of paged attention: loading queries and pages, scores, and storing rows."""

import triton
import triton.language as tl

from ejkernel_triton.blocks import LN2, LOG2E, at_batch, finite, round_bfloat16, tanh

# Fields of a work entry.
SEQUENCE = tl.constexpr(0)
ROW = tl.constexpr(1)
ROWS = tl.constexpr(2)
POSITION = tl.constexpr(3)
CONTEXT = tl.constexpr(4)
LOW = tl.constexpr(5)
HIGH = tl.constexpr(6)
START = tl.constexpr(7)
TILES = tl.constexpr(8)
FIELDS = tl.constexpr(9)


@triton.jit
def rounded(x, spec: tl.constexpr):
    """Returns a tile rounded to `compute_dtype`, to nearest with ties to even; unchanged without `compute_dtype`."""
    # Rounds explicitly, since the interpreter's cast truncates.
    if spec.ROUND == "bfloat16":
        x = round_bfloat16(x.to(tl.float32))
    if spec.ROUND == "float16":
        x = x.to(tl.float16)
    if spec.BYTES == 1:
        # Triton's interpreter converts integers to the bits of bfloat16.
        x = x.to(tl.float32)
    return x


@triton.jit
def key_operand(x, spec: tl.constexpr):
    """Returns a tile of queries or keys, converted to the dtype in which queries and keys are multiplied."""
    x = rounded(x, spec)
    if spec.OPERAND == "float32":
        return x.to(tl.float32)
    elif spec.OPERAND == "bfloat16":
        return x.to(tl.bfloat16)
    else:
        return x.to(tl.float16)


@triton.jit
def value_operand(x, spec: tl.constexpr):
    """Returns a tile of values, converted to the dtype in which weights and values are multiplied."""
    x = rounded(x, spec)
    if spec.VALUE == "float32":
        return x.to(tl.float32)
    elif spec.VALUE == "bfloat16":
        return x.to(tl.bfloat16)
    else:
        return x.to(tl.float16)


@triton.jit
def load_queries(query, row, rows, head, spec: tl.constexpr):
    """Loads the queries of an entry's rows and one tile of heads; row m is query row m // G of head m % G.

    Returns:
        [M, BD], all columns or those that are multiplied with a latent vector, and [M, BR], the rotary columns.
    """
    m = tl.arange(0, spec.M)
    d = tl.arange(0, spec.BD)
    r = tl.arange(0, spec.BR)
    # All query heads of a KV head are rows of one tile, so a key tile is loaded once for all of them. Padding rows and
    # columns are 0.
    at = tl.cast((row + m // spec.G) * spec.H + head * spec.G + m % spec.G, tl.int64)[:, None] * spec.D
    mask = (m < rows * spec.G)[:, None]
    q = tl.load(query + at + d[None, :], mask=mask & (d < spec.D - spec.ROTARY)[None, :], other=0.0)
    rotary = tl.load(query + at + (spec.LATENT + r)[None, :], mask=mask & (r < spec.ROTARY)[None, :], other=0.0)
    return q, rotary


@triton.jit
def pages_of(tables, sequence, tile, k, valid, spec: tl.constexpr):
    """Returns the page of every key of a tile, or of the whole tile if WHOLE, and the mask of keys in the sequence.

    A table entry that is no valid page index is padding.
    """
    if spec.TABLE == 0:
        return sequence, valid & (k < spec.PAGE_SIZE)
    elif spec.WHOLE:
        column = tile * spec.BLOCK_KV // spec.PAGE_SIZE
        # The last tile may start past the table's end.
        page = tl.load(tables + sequence * spec.TABLE + column, mask=column < spec.TABLE, other=-1)
        in_range = (page >= 0) & (page < spec.PAGES)
        # Triton's interpreter converts the & of a boolean vector and a scalar to integers.
        return tl.where(in_range, page, 0), valid & (tl.zeros_like(k) + tl.where(in_range, 1, 0) > 0)
    else:
        column = k // spec.PAGE_SIZE
        valid = valid & (column < spec.TABLE)
        page = tl.load(tables + sequence * spec.TABLE + column, mask=valid, other=-1)
        valid = valid & (page >= 0) & (page < spec.PAGES)
        return tl.where(valid, page, 0), valid


@triton.jit
def load_rows(
    head_rows,
    page,
    tile,
    k,
    valid,
    columns,
    column_mask,
    VALUES: tl.constexpr,
    spec: tl.constexpr,
):
    """Loads columns of a tile's rows of one head's keys or, if VALUES, of its values; 0 where `valid` is false."""
    per_page: tl.constexpr = spec.VALUE_STRIDES[0] if VALUES else spec.KEY_STRIDES[0]
    per_slot: tl.constexpr = spec.VALUE_STRIDES[1] if VALUES else spec.KEY_STRIDES[1]
    # 64 bits: a cache may have more than 2 ** 31 elements.
    page = tl.cast(page, tl.int64)
    if spec.WHOLE:
        # Page indices per key would take one pipeline stage, and registers for pointers. With one page index per tile,
        # all stages hold tiles.
        slot = tile * spec.BLOCK_KV if spec.TABLE == 0 else tile * spec.BLOCK_KV % spec.PAGE_SIZE
        first = head_rows + page * per_page + tl.cast(slot, tl.int64) * per_slot
        rows = first + tl.arange(0, spec.BLOCK_KV) * per_slot
        return tl.load(rows[:, None] + columns[None, :], mask=valid[:, None] & column_mask[None, :], other=0.0)
    else:
        at = page * per_page + tl.where(valid, k % spec.PAGE_SIZE, 0) * per_slot
        return tl.load(
            head_rows + at[:, None] + columns[None, :], mask=valid[:, None] & column_mask[None, :], other=0.0
        )


@triton.jit
def load_positions(work, positions, row, rows, m, spec: tl.constexpr):
    """Returns positions and contexts of an entry's query rows m.

    Both are scalars, of the entry's first row, if its rows are consecutive tokens of one sequence; `row_positions`
    continues them. If they are of several sequences, both are [M].
    """
    if spec.ROW_POSITIONS:
        mask = m < rows * spec.G
        at = positions + tl.cast(row + m // spec.G, tl.int64) * 2
        return tl.load(at, mask=mask, other=-1), tl.load(at + 1, mask=mask, other=0)
    else:
        return tl.load(work + POSITION), tl.load(work + CONTEXT)


@triton.jit
def row_positions(position, m, spec: tl.constexpr):
    """Returns the position of query rows m, from what `load_positions` returns."""
    if spec.ROW_POSITIONS:
        return position
    else:
        return position + m // spec.G


@triton.jit
def scores_of(products, k, position, context, m, slopes, qq_bias, qq_rows, PAIRS: tl.constexpr, spec: tl.constexpr):
    """Returns scores [M, BLOCK_KV] in base 2, from products of queries and keys. PAIRS says whether some of the keys
    may be new tokens, which have biases.
    """
    scores = products * spec.FACTOR
    if spec.PLAIN:
        return scores
    else:
        if spec.ALIBI:
            # The distance is counted from the first new token, as in the family's formula; another origin would change
            # lse and the weight of a sink.
            if spec.ROW_POSITIONS:
                scores += slopes[:, None] * (k[None, :] - context[:, None]).to(tl.float32)
            else:
                scores += slopes[:, None] * (k - context).to(tl.float32)[None, :]
        if PAIRS:
            row = position + m // spec.G - context
            column = k - context
            # The bias applies to pairs of new tokens only, such as the mask of a draft tree.
            in_range = ((row >= 0) & (row < qq_rows))[:, None] & ((column >= 0) & (column < qq_rows))[None, :]
            index = row[:, None] * qq_rows + column[None, :]
            scores += tl.load(qq_bias + index, mask=in_range, other=0.0).to(tl.float32)
        if spec.CAP is not None:
            capped = spec.CAP * tanh(scores * (1.0 / spec.CAP), spec.FAST_TANH)
            # tanh(-inf) is -1, so pairs that a bias of -inf masks must be masked again.
            scores = tl.where(scores == float("-inf"), scores, capped) if PAIRS else capped
        return scores * LOG2E


@triton.jit
def slopes_of(slopes, head, spec: tl.constexpr):
    """Returns slopes [M] of an item's rows."""
    M: tl.constexpr = spec.M
    m = tl.arange(0, M)
    if spec.ALIBI:
        return tl.load(slopes + head * spec.G + m % spec.G).to(tl.float32)
    else:
        return tl.zeros([M], tl.float32)


@triton.jit
def store_rows(output, lse, acc, tail, row_max, row_sum, row, rows, head, sinks, m, spec: tl.constexpr):
    """The epilogue: adds the sink to the denominator, normalises, and stores rows m of an item's output and lse.

    `tail` holds the value columns after those of `acc`, if any.
    """
    mask = m < rows * spec.G
    base = finite(row_max)
    factor = tl.full(m.shape, 1.0, tl.float32)
    if spec.SINKS:
        # The sink may exceed every score, so it joins the maximum as well as the denominator. It has no value.
        sink = tl.load(sinks + head * spec.G + m % spec.G) * LOG2E
        base = finite(tl.maximum(row_max, sink))
        factor = tl.exp2(row_max - base)
        row_sum = row_sum * factor + tl.exp2(sink - base)
    denominator = tl.where(row_sum > 0.0, row_sum, 1.0)
    at = tl.cast((row + m // spec.G) * spec.H + head * spec.G + m % spec.G, tl.int64)
    # A row without keys: output 0 and lse -inf.
    tl.store(lse + at, tl.where(row_sum > 0.0, (tl.log2(denominator) + base) * LN2, float("-inf")), mask=mask)
    factor = (factor * spec.VALUE_SCALE / denominator)[:, None]
    dv = tl.arange(0, spec.BV)
    offsets = at[:, None] * spec.DV + dv[None, :]
    width = spec.LATENT if spec.TAIL else spec.DV
    # Padding columns, and the rotary ones of `tail`, are not stored here.
    tl.store(output + offsets, (acc * factor).to(output.dtype.element_ty), mask=mask[:, None] & (dv < width)[None, :])
    if spec.TAIL:
        r = tl.arange(0, spec.BR)
        offsets = at[:, None] * spec.DV + (spec.LATENT + r)[None, :]
        in_range = mask[:, None] & (r < spec.ROTARY)[None, :]
        tl.store(output + offsets, (tail * factor).to(output.dtype.element_ty), mask=in_range)


@triton.jit
def store_partial(parts, slot, acc, tail, spec: tl.constexpr):
    """Stores unnormalised values of rows in their slots, [PART] each: those of `acc`, then those of `tail`."""
    PART: tl.constexpr = spec.BV + (spec.BR if spec.TAIL else 0)
    tl.store(parts + slot[:, None] * PART + tl.arange(0, spec.BV)[None, :], acc)
    if spec.TAIL:
        tl.store(parts + slot[:, None] * PART + (spec.BV + tl.arange(0, spec.BR))[None, :], tail)


@triton.jit
def load_share(work, shares, sinks, batch, spec: tl.constexpr, per: tl.constexpr):
    """Returns the work list, the programs' shares and the sinks of a batch row."""
    work = at_batch(work, batch, per.WORK, spec.ENTRIES * FIELDS)
    shares = at_batch(shares, batch, per.SHARES, (spec.PROGRAMS + 1) * 2)
    if spec.SINKS:
        sinks = at_batch(sinks, batch, per.SINKS, spec.H)
    return work, shares, sinks
