"""Selects the K largest of each row of scores, of equal ones the first, in the order of keys; `sort_selected` sorts them.

    row of scores  --sample--> guess of a lower bound   (a row of at most CANDIDATES keys is in registers at once)
         |
         +-- one pass: scores above the guess, in the order of keys --> candidates (scratch memory)
                        |
                        +-- fewer than K or more than fit: bisect the whole row, another pass

    candidates (registers)  --bisect--> threshold, number of equal scores to take  -->  K selected

Bisection counts the scores above a threshold; it halves an interval of integers, so 32 counts are enough for any row.
The guess decides only how long it takes: what is selected is exact. There are no atomics.
"""

import triton
import triton.language as tl

from ejkernel_triton.blocks import batch_row_address
from ejkernel_triton.lightning_indexer.kernels.ordered_integers import NO_SCORE

BELOW_SCORES = tl.constexpr(-0x7F800001)
"""The integer before that of -inf."""
TILE = tl.constexpr(4096)
"""Scores of a row per step of a pass."""


@triton.jit
def select_top_k_kernel(
    ordered_scores,
    key_starts,
    key_ends,
    first_query,
    indices,
    selected_scores,
    scratch,
    spec: tl.constexpr,
    per: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    TARGET: tl.constexpr,
):
    """Selects for all rows of a chunk, over which NUM_PROGRAMS persistent programs per batch row loop.

    CANDIDATES is a power of two, at least K, and TARGET how many candidates of a longer row the guess aims at. Each
    program has scratch memory for [2, CANDIDATES] int32. Rows of fewer than K keys leave the last entries unwritten.
    """
    batch = tl.cast(tl.program_id(0) // NUM_PROGRAMS, tl.int64)
    first_token = tl.load(batch_row_address(first_query, batch, per.FIRST_QUERY, 1))
    ordered_scores = batch_row_address(ordered_scores, batch, per.ORDERED_SCORES, spec.CHUNK * spec.S)
    key_starts = batch_row_address(key_starts, batch, per.KEY_STARTS, spec.T)
    key_ends = batch_row_address(key_ends, batch, per.KEY_ENDS, spec.T)
    scratch += tl.cast(tl.program_id(0), tl.int64) * (2 * CANDIDATES)
    c = tl.arange(0, CANDIDATES)
    for row in tl.range(tl.program_id(0) % NUM_PROGRAMS, spec.CHUNK, NUM_PROGRAMS):
        token = first_token + row
        start = tl.load(key_starts + token, mask=token < spec.T, other=0)
        count = tl.maximum(tl.load(key_ends + token, mask=token < spec.T, other=0) - start, 0)
        row_scores = ordered_scores + tl.cast(row, tl.int64) * spec.S + start
        if count <= CANDIDATES:
            x = tl.load(row_scores + c, mask=c < count, other=NO_SCORE)
            offset = c
        else:
            count = _store_candidates(row_scores, count, scratch, spec, CANDIDATES, TARGET)
            # Barrier: threads read what others wrote.
            tl.debug_barrier()
            x = tl.load(scratch + c, mask=c < count, other=NO_SCORE)
            offset = tl.load(scratch + CANDIDATES + c, mask=c < count, other=0)
        threshold, num_ties = _threshold_of_candidates(x, count, spec)
        is_tie = (x == threshold).to(tl.int32)
        is_selected = (x > threshold) | ((is_tie > 0) & (tl.cumsum(is_tie, 0) <= num_ties))
        slot = tl.cumsum(is_selected.to(tl.int32), 0) - 1
        at = (batch * spec.CHUNK + row) * spec.K + slot
        tl.store(indices + at, start + offset, mask=is_selected)
        tl.store(selected_scores + at, x, mask=is_selected)
        # Barrier: the next row overwrites scratch memory that this one has read.
        tl.debug_barrier()


@triton.jit
def _store_candidates(
    row_scores, num_keys, scratch, spec: tl.constexpr, CANDIDATES: tl.constexpr, TARGET: tl.constexpr
):
    """Stores between K and CANDIDATES scores of a longer row in scratch memory, the K largest among them, and their
    offsets in the row; returns how many.
    """
    i = tl.arange(0, CANDIDATES)
    sample = tl.load(row_scores + ((i.to(tl.int64) * num_keys) // CANDIDATES))
    rank = tl.maximum(tl.cast((tl.cast(TARGET, tl.int64) * CANDIDATES) // num_keys, tl.int32), 1)
    guess, _, _ = _bisect(sample, tl.min(sample, 0) - 1, tl.max(sample, 0), rank - rank // 16, rank + rank // 16)
    count = _store_above(row_scores, num_keys, guess, 0, scratch, CANDIDATES, False)
    if (count < spec.K) | (count > CANDIDATES):
        low = tl.where(count < spec.K, BELOW_SCORES, guess)
        high = tl.where(count < spec.K, guess, 0x7FFFFFFF)
        above = tl.where(count < spec.K, count, 0)
        while low + 1 < high:
            middle = (low & high) + ((low ^ high) >> 1)
            num_above = _count_above(row_scores, num_keys, middle)
            low = tl.where(num_above < spec.K, low, middle)
            high = tl.where(num_above < spec.K, middle, high)
            above = tl.where(num_above < spec.K, num_above, above)
        # Barrier: what the first pass stored is overwritten.
        tl.debug_barrier()
        count = _store_above(row_scores, num_keys, high, spec.K - above, scratch, CANDIDATES, True)
    return count


@triton.jit
def _bisect(x, low, high, fewest, most):
    """Returns (low, high, number of x above high): a threshold with fewest to most x above it twice if it meets one,
    else consecutive integers, with at least `fewest` x above `low` and fewer above `high`.

    The arguments have that property too, and no x is above `high`.
    """
    above = 0
    while low + 1 < high:
        middle = (low & high) + ((low ^ high) >> 1)  # their mean, without overflow
        num_above = tl.sum((x > middle).to(tl.int32), 0)
        is_below, is_enough = num_above <= most, num_above >= fewest
        low = tl.where(is_enough, middle, low)
        high = tl.where(is_below, middle, high)
        above = tl.where(is_below, num_above, above)
    return low, high, above


@triton.jit
def _threshold_of_candidates(x, count, spec: tl.constexpr):
    """Returns the threshold above which scores are selected, and how many that equal it."""
    threshold = tl.full([], BELOW_SCORES, tl.int32)
    num_ties = tl.full([], 0, tl.int32)
    if count > spec.K:
        lowest = tl.min(tl.where(x == NO_SCORE, 0x7FFFFFFF, x), 0)
        _, threshold, above = _bisect(x, lowest - 1, tl.max(x, 0), spec.K, spec.K)
        num_ties = spec.K - above
    return threshold, num_ties


@triton.jit
def _count_above(row_scores, num_keys, threshold):
    """Returns how many scores of a row are above a threshold."""
    counts = tl.zeros([TILE], tl.int32)
    for first in tl.range(0, num_keys, TILE):
        i = first + tl.arange(0, TILE)
        x = tl.load(row_scores + i, mask=i < num_keys, other=NO_SCORE)
        counts += (x > threshold).to(tl.int32)
    return tl.sum(counts, 0)


@triton.jit
def _store_above(
    row_scores, num_keys, threshold, num_ties, scratch, CANDIDATES: tl.constexpr, HAS_TIES: tl.constexpr
):
    """Stores the scores of a row above a threshold and, if HAS_TIES, the first `num_ties` that equal it, in order, with
    their offsets; returns how many there are, of which the first CANDIDATES are stored.
    """
    count, earlier_ties = 0, 0
    for first in tl.range(0, num_keys, TILE):
        i = first + tl.arange(0, TILE)
        x = tl.load(row_scores + i, mask=i < num_keys, other=NO_SCORE)
        is_kept = x > threshold
        if HAS_TIES:
            is_tie = (x == threshold).to(tl.int32)
            is_kept = is_kept | ((is_tie > 0) & (earlier_ties + tl.cumsum(is_tie, 0) <= num_ties))
            earlier_ties += tl.sum(is_tie, 0)
        kept = is_kept.to(tl.int32)
        slot = count + tl.cumsum(kept, 0) - 1
        is_stored = is_kept & (slot < CANDIDATES)
        tl.store(scratch + slot, x, mask=is_stored)
        tl.store(scratch + CANDIDATES + slot, i, mask=is_stored)
        count += tl.sum(kept, 0)
    return count
