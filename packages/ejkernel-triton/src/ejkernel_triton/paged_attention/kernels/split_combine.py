r"""The combine of split-KV: merges the slots of items whose key tiles are split over several programs.

    program p - 1             program p             program p + 1
    slot 2p - 1: m, l, acc    slot 2p: m, l, acc    slot 2p + 2: m, l, acc     partial softmaxes of one item
            \____________________|____________________/
                       m' = max m_i,  l = sum exp2(m_i - m') l_i,  output = sum exp2(m_i - m') acc_i / l

A program merges one row of the item that its program p of `paged_attention_kernel` was the second to process; other
programs return.
"""

import triton
import triton.language as tl

from ejkernel_triton.blocks import at_batch, finite
from ejkernel_triton.paged_attention.kernels.tile import FIELDS, ROW, ROWS, START, TILES, load_share, store_rows


@triton.jit
def split_combine_kernel(
    parts,
    row_maxima,
    row_sums,
    work,
    shares,
    sinks,
    output_so_far,
    lse_so_far,
    output,
    lse,
    spec: tl.constexpr,
    per: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Merges one row of the item in which a program's share starts, if that is the first split of the item.

    `output` and `lse` alias `output_so_far` and `lse_so_far`; only rows of split items are written.
    """
    BV: tl.constexpr = spec.BV
    BR: tl.constexpr = spec.BR
    row_program = tl.program_id(0)
    # The grid covers the largest case: every row of every program's first item. Which items are split depends on
    # lengths, which may be traced.
    m = row_program % spec.M
    split = row_program // spec.M % spec.SPLITS
    program = (row_program // (spec.M * spec.SPLITS)) % spec.PROGRAMS
    batch = tl.cast(row_program // (spec.M * spec.SPLITS * spec.PROGRAMS), tl.int64)
    work, shares, sinks = load_share(work, shares, sinks, batch, spec, per)
    PART: tl.constexpr = spec.BV + (spec.BR if spec.TAIL else 0)
    SLOT_ROWS: tl.constexpr = spec.PROGRAMS * spec.SPLITS * 2 * spec.M
    parts = at_batch(parts, batch, per.PARTS, SLOT_ROWS * PART)
    row_maxima = at_batch(row_maxima, batch, per.ROW_MAXIMA, SLOT_ROWS)
    row_sums = at_batch(row_sums, batch, per.ROW_SUMS, SLOT_ROWS)
    output, lse = output + batch * spec.ROWS * spec.H * spec.DV, lse + batch * spec.ROWS * spec.H
    share, total = tl.load(shares + spec.PROGRAMS * 2), tl.load(shares + spec.PROGRAMS * 2 + 1)
    entry_at = work + tl.load(shares + program * 2) * FIELDS
    begin = tl.load(shares + program * 2 + 1)
    # At least one tile: programs without a share refer to entries that may have none, and divide by it below.
    start, tiles = tl.load(entry_at + START), tl.maximum(tl.load(entry_at + TILES), 1)
    row, rows = tl.load(entry_at + ROW), tl.load(entry_at + ROWS)
    head = (begin - start) // tiles
    item = start + head * tiles
    before = begin - share
    # Only the second program of an item merges it: its share starts inside the item, and the previous program's does
    # not.
    if (begin < total) & (begin > item) & (before <= item) & (m < rows * spec.G):
        # The previous program has the item's first tiles.
        row_max = tl.full([1], float("-inf"), tl.float32)
        row_sum = tl.zeros([1], tl.float32)
        acc = tl.zeros([1, BV], tl.float32)
        tail = tl.zeros([1, BR], tl.float32)
        count = 1 + (item + tiles - begin + share - 1) // share
        # An online softmax over slots, PARTS at a time, in the order of programs: results are reproducible bit for bit.
        for part in tl.range(0, count, PARTS):
            number = part + tl.arange(0, PARTS)
            valid = number < count
            # The first part is in the second slot of its program, unless that program's share starts with the item.
            second = tl.where((number == 0) & (before < item), 1, 0)
            slot = ((program - 1 + number) * spec.SPLITS + split) * 2 + second
            at = tl.cast(slot * spec.M + m, tl.int64)
            # Slots past the last one have maximum -inf, so weight 0.
            maxima = tl.load(row_maxima + at, mask=valid, other=float("-inf"))
            sums = tl.load(row_sums + at, mask=valid, other=0.0)
            dv = tl.arange(0, BV)
            accs = tl.load(parts + at[:, None] * PART + dv[None, :], mask=valid[:, None], other=0.0)
            new_max = tl.maximum(row_max, tl.max(maxima, 0))
            shift = finite(new_max)
            # Each slot is relative to its own maximum: rescale to the common one.
            weights = tl.exp2(maxima - shift)
            alpha = tl.exp2(row_max - shift)
            row_sum = row_sum * alpha + tl.sum(sums * weights, 0)
            acc = acc * alpha[:, None] + tl.sum(accs * weights[:, None], 0)[None, :]
            if spec.TAIL:
                r = BV + tl.arange(0, BR)
                tails = tl.load(parts + at[:, None] * PART + r[None, :], mask=valid[:, None], other=0.0)
                tail = tail * alpha[:, None] + tl.sum(tails * weights[:, None], 0)[None, :]
            row_max = new_max
        q_head = head * spec.SPLITS + split
        rows_of_m = m + tl.zeros([1], tl.int32)
        store_rows(output, lse, acc, tail, row_max, row_sum, row, rows, q_head, sinks, rows_of_m, spec)
