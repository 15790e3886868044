# pyright: basic, reportIndexIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalMemberAccess=false, reportGeneralTypeIssues=false
"""Merging the parts of items whose key tiles several programs had."""

import triton
import triton.language as tl

from ejkernel_triton.blocks import at_batch, finite
from ejkernel_triton.paged_attention.paged_tile import FIELDS, ROW, ROWS, START, TILES, plan_of, store_rows


@triton.jit
def combine_kernel(
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
    """Merges one row of the item in which a program's share begins, if that is the first cut through the item.

    `output` and `lse` are `output_so_far` and `lse_so_far`: the same memory, of which only shared rows are written.
    """
    BV: tl.constexpr = spec.BV
    row_program = tl.program_id(0)
    m = row_program % spec.M
    program = (row_program // spec.M) % spec.PROGRAMS
    batch = tl.cast(row_program // (spec.M * spec.PROGRAMS), tl.int64)
    work, shares, sinks = plan_of(work, shares, sinks, batch, spec, per)
    parts = at_batch(parts, batch, per.PARTS, spec.PROGRAMS * 2 * spec.M * spec.BV)
    row_maxima = at_batch(row_maxima, batch, per.ROW_MAXIMA, spec.PROGRAMS * 2 * spec.M)
    row_sums = at_batch(row_sums, batch, per.ROW_SUMS, spec.PROGRAMS * 2 * spec.M)
    output, lse = output + batch * spec.ROWS * spec.H * spec.DV, lse + batch * spec.ROWS * spec.H
    share, total = tl.load(shares + spec.PROGRAMS * 2), tl.load(shares + spec.PROGRAMS * 2 + 1)
    own = work + tl.load(shares + program * 2) * FIELDS
    begin = tl.load(shares + program * 2 + 1)
    start, tiles = tl.load(own + START), tl.maximum(tl.load(own + TILES), 1)
    row, rows = tl.load(own + ROW), tl.load(own + ROWS)
    head = (begin - start) // tiles
    item = start + head * tiles
    before = begin - share
    if (begin < total) & (begin > item) & (before <= item) & (m < rows * spec.G):
        # The program before this one has the item's first tiles; it began with the item, or came to it.
        row_max = tl.full([1], float("-inf"), tl.float32)
        row_sum = tl.zeros([1], tl.float32)
        acc = tl.zeros([1, BV], tl.float32)
        count = 1 + (item + tiles - begin + share - 1) // share
        for part in tl.range(0, count, PARTS):
            number = part + tl.arange(0, PARTS)
            there = number < count
            # The first part is in the second slot of its program, unless the program began with the item.
            slot = (program - 1 + number) * 2 + tl.where((number == 0) & (before < item), 1, 0)
            at = tl.cast(slot * spec.M + m, tl.int64)
            maxima = tl.load(row_maxima + at, mask=there, other=float("-inf"))
            sums = tl.load(row_sums + at, mask=there, other=0.0)
            dv = tl.arange(0, BV)
            accs = tl.load(parts + at[:, None] * spec.BV + dv[None, :], mask=there[:, None], other=0.0)
            new_max = tl.maximum(row_max, tl.max(maxima, 0))
            shift = finite(new_max)
            weights = tl.exp2(maxima - shift)
            alpha = tl.exp2(row_max - shift)
            row_sum = row_sum * alpha + tl.sum(sums * weights, 0)
            acc = acc * alpha[:, None] + tl.sum(accs * weights[:, None], 0)[None, :]
            row_max = new_max
        store_rows(output, lse, acc, row_max, row_sum, row, rows, head, sinks, m + tl.zeros([1], tl.int32), spec)
