# pyright: basic, reportIndexIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalMemberAccess=false, reportGeneralTypeIssues=false
"""One tile of paged attention: its queries, where its keys lie, its scores, and what its rows end as."""

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
    """A tile rounded to `compute_dtype`, to the nearest with ties to even; as it is where there is none."""
    if spec.ROUND == "bfloat16":
        x = round_bfloat16(x.to(tl.float32))
    if spec.ROUND == "float16":
        x = x.to(tl.float16)
    if spec.BYTES == 1:
        # Triton's interpreter converts integers to bfloat16 as the integers that hold its bits.
        x = x.to(tl.float32)
    return x


@triton.jit
def key_operand(x, spec: tl.constexpr):
    """A tile of queries or keys in the dtype in which they meet."""
    x = rounded(x, spec)
    if spec.OPERAND == "float32":
        return x.to(tl.float32)
    elif spec.OPERAND == "bfloat16":
        return x.to(tl.bfloat16)
    else:
        return x.to(tl.float16)


@triton.jit
def value_operand(x, spec: tl.constexpr):
    """A tile of values in the dtype in which they meet weights."""
    x = rounded(x, spec)
    if spec.VALUE == "float32":
        return x.to(tl.float32)
    elif spec.VALUE == "bfloat16":
        return x.to(tl.bfloat16)
    else:
        return x.to(tl.float16)


@triton.jit
def load_queries(query, row, rows, head, spec: tl.constexpr):
    """Queries of an entry's rows and one tile of heads; row m is query row m // G of head m % G.

    Returns:
        [M, BD], all columns or those that meet a latent vector, and [M, BR], those that meet rotary columns.
    """
    m = tl.arange(0, spec.M)
    d = tl.arange(0, spec.BD)
    r = tl.arange(0, spec.BR)
    at = tl.cast((row + m // spec.G) * spec.H + head * spec.G + m % spec.G, tl.int64)[:, None] * spec.D
    keep = (m < rows * spec.G)[:, None]
    q = tl.load(query + at + d[None, :], mask=keep & (d < spec.D - spec.ROTARY)[None, :], other=0.0)
    rotary = tl.load(query + at + (spec.LATENT + r)[None, :], mask=keep & (r < spec.ROTARY)[None, :], other=0.0)
    return q, rotary


@triton.jit
def pages_of(tables, sequence, tile, k, present, spec: tl.constexpr):
    """Page of every key of a tile, or of all if WHOLE, and which keys are there.

    A table entry that is no page of the cache is padding.
    """
    if spec.TABLE == 0:
        return sequence, present & (k < spec.PAGE_SIZE)
    elif spec.WHOLE:
        column = tile * spec.BLOCK_KV // spec.PAGE_SIZE
        page = tl.load(tables + sequence * spec.TABLE + column, mask=column < spec.TABLE, other=-1)
        inside = (page >= 0) & (page < spec.PAGES)
        # Triton's interpreter makes integers of a vector of truth values and a single one.
        return tl.where(inside, page, 0), present & (tl.zeros_like(k) + tl.where(inside, 1, 0) > 0)
    else:
        column = k // spec.PAGE_SIZE
        present = present & (column < spec.TABLE)
        page = tl.load(tables + sequence * spec.TABLE + column, mask=present, other=-1)
        present = present & (page >= 0) & (page < spec.PAGES)
        return tl.where(present, page, 0), present


@triton.jit
def load_rows(
    head_rows,
    page,
    tile,
    k,
    there,
    columns,
    wanted,
    VALUES: tl.constexpr,
    spec: tl.constexpr,
):
    """Columns of the rows of a tile's keys, one head's of keys or, if VALUES, of values; 0 where a key is not there."""
    per_page: tl.constexpr = spec.VALUE_STRIDES[0] if VALUES else spec.KEY_STRIDES[0]
    per_slot: tl.constexpr = spec.VALUE_STRIDES[1] if VALUES else spec.KEY_STRIDES[1]
    # 64 bits: a cache may have more than 2 ** 31 elements.
    page = tl.cast(page, tl.int64)
    if spec.WHOLE:
        # Page numbers for each key would take a pipeline stage of their own, and registers for where they lead: with
        # one a tile, all stages hold tiles.
        slot = tile * spec.BLOCK_KV if spec.TABLE == 0 else tile * spec.BLOCK_KV % spec.PAGE_SIZE
        first = head_rows + page * per_page + tl.cast(slot, tl.int64) * per_slot
        rows = first + tl.arange(0, spec.BLOCK_KV) * per_slot
        return tl.load(rows[:, None] + columns[None, :], mask=there[:, None] & wanted[None, :], other=0.0)
    else:
        at = page * per_page + tl.where(there, k % spec.PAGE_SIZE, 0) * per_slot
        return tl.load(head_rows + at[:, None] + columns[None, :], mask=there[:, None] & wanted[None, :], other=0.0)


@triton.jit
def scores_of(products, k, position, context, m, slopes, qq_bias, spec: tl.constexpr):
    """Scores [M, BLOCK_KV] as powers of two, from products of queries and keys."""
    scores = products * spec.FACTOR
    if spec.PLAIN:
        return scores
    else:
        if spec.ALIBI:
            scores += slopes[:, None] * (k - context).to(tl.float32)[None, :]
        if spec.QQ > 0:
            row = position + m // spec.G - context
            column = k - context
            inside = ((row >= 0) & (row < spec.QQ))[:, None] & ((column >= 0) & (column < spec.QQ))[None, :]
            scores += tl.load(qq_bias + row[:, None] * spec.QQ + column[None, :], mask=inside, other=0.0).to(tl.float32)
        if spec.CAP is not None:
            scores = spec.CAP * tanh(scores * (1.0 / spec.CAP), spec.FAST_TANH)
        return scores * LOG2E


@triton.jit
def slopes_of(slopes, head, spec: tl.constexpr):
    """Slopes [M] of an item's rows."""
    M: tl.constexpr = spec.M
    m = tl.arange(0, M)
    if spec.ALIBI:
        return tl.load(slopes + head * spec.G + m % spec.G).to(tl.float32)
    else:
        return tl.zeros([M], tl.float32)


@triton.jit
def store_rows(output, lse, acc, tail, row_max, row_sum, row, rows, head, sinks, m, spec: tl.constexpr):
    """Takes the sink into the denominator, normalises, and stores rows m of an item's output and lse.

    `tail` holds the values' columns behind those of `acc`, where there are any.
    """
    keep = m < rows * spec.G
    base = finite(row_max)
    factor = tl.full(m.shape, 1.0, tl.float32)
    if spec.SINKS:
        sink = tl.load(sinks + head * spec.G + m % spec.G) * LOG2E
        base = finite(tl.maximum(row_max, sink))
        factor = tl.exp2(row_max - base)
        row_sum = row_sum * factor + tl.exp2(sink - base)
    some = tl.where(row_sum > 0.0, row_sum, 1.0)
    at = tl.cast((row + m // spec.G) * spec.H + head * spec.G + m % spec.G, tl.int64)
    tl.store(lse + at, tl.where(row_sum > 0.0, (tl.log2(some) + base) * LN2, float("-inf")), mask=keep)
    factor = (factor * spec.VALUE_SCALE / some)[:, None]
    dv = tl.arange(0, spec.BV)
    where = at[:, None] * spec.DV + dv[None, :]
    width = spec.LATENT if spec.TAIL else spec.DV
    tl.store(output + where, (acc * factor).to(output.dtype.element_ty), mask=keep[:, None] & (dv < width)[None, :])
    if spec.TAIL:
        r = tl.arange(0, spec.BR)
        where = at[:, None] * spec.DV + (spec.LATENT + r)[None, :]
        inside = keep[:, None] & (r < spec.ROTARY)[None, :]
        tl.store(output + where, (tail * factor).to(output.dtype.element_ty), mask=inside)


@triton.jit
def store_part(parts, slot, acc, tail, spec: tl.constexpr):
    """Stores unnormalised values of rows in their slots, [PART] each: those of `acc`, then those of `tail`."""
    PART: tl.constexpr = spec.BV + (spec.BR if spec.TAIL else 0)
    tl.store(parts + slot[:, None] * PART + tl.arange(0, spec.BV)[None, :], acc)
    if spec.TAIL:
        tl.store(parts + slot[:, None] * PART + (spec.BV + tl.arange(0, spec.BR))[None, :], tail)


@triton.jit
def plan_of(work, shares, sinks, batch, spec: tl.constexpr, per: tl.constexpr):
    """The work list, the programs' shares and the sinks of a batch row."""
    work = at_batch(work, batch, per.WORK, spec.ENTRIES * FIELDS)
    shares = at_batch(shares, batch, per.SHARES, (spec.PROGRAMS + 1) * 2)
    if spec.SINKS:
        sinks = at_batch(sinks, batch, per.SINKS, spec.H)
    return work, shares, sinks
