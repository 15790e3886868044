"""Sorts the selected keys of each query by descending score, and equal scores by key.

The selection is in the order of keys, so a place in it identifies a key. The sorted integers have 32 bits, since 64
would take twice the instructions: the leading bits of a score's distance from the lowest one, and the complement of its
place.

    selection (x, key)[place] --> | (x - lowest) >> shift | -place | --sort--> places, nearly in order
    until no pair changes: places 0 1 | 2 3 | 4 5 ..., then 0 | 1 2 | 3 4 | 5 ... by (x, -place)      --> in order

Scores that only the shifted bits tell apart are neighbours after the sort: one pass of comparisons is usually enough.
"""

import triton
import triton.language as tl

from ejkernel_triton.blocks import batch_row_address
from ejkernel_triton.lightning_indexer.kernels.ordered_integers import floats_of_integers
from ejkernel_triton.lightning_indexer.kernels.rows import LARGEST, NO_SCORE


@triton.jit
def sort_selected_kernel(
    selected_scores, selected_keys, counts, indices, scores, spec: tl.constexpr, per: tl.constexpr
):
    """Sorts the selection of one query; -1 and -inf where it has fewer than K keys."""
    row = tl.cast(tl.program_id(0) % spec.CHUNK, tl.int64)
    batch = tl.cast(tl.program_id(0) // spec.CHUNK, tl.int64)
    count = tl.minimum(tl.load(batch_row_address(counts, batch, per.COUNTS, spec.CHUNK) + row), spec.K)
    n = tl.arange(0, spec.BK)
    is_key = n < count
    selected_scores = batch_row_address(selected_scores, batch, per.SELECTED_SCORES, spec.CHUNK * spec.K) + row * spec.K
    selected_keys = batch_row_address(selected_keys, batch, per.SELECTED_KEYS, spec.CHUNK * spec.K) + row * spec.K
    places = indices + (batch * spec.CHUNK + row) * spec.K
    place = _sort_nearly(tl.load(selected_scores + n, mask=is_key, other=NO_SCORE), is_key, spec)
    tl.store(places + n, place, mask=is_key)
    changes = 1
    while changes > 0:
        place, changes = _order_pairs(places, selected_scores, place, n, n ^ 1, count, 0)
        place, changes = _order_pairs(places, selected_scores, place, n, ((n + 1) ^ 1) - 1, count, changes)
    x = tl.load(selected_scores + place, mask=is_key, other=NO_SCORE)
    key = tl.load(selected_keys + place, mask=is_key, other=-1)
    at = (batch * spec.CHUNK + row) * spec.K + n
    tl.store(indices + at, key, mask=n < spec.K)
    tl.store(scores + at, tl.where(is_key, floats_of_integers(x), float("-inf")), mask=n < spec.K)


@triton.jit
def _sort_nearly(x, is_key, spec: tl.constexpr):
    """Returns the places of x in descending order of their leading bits, equal ones in order, and others last."""
    lowest = tl.min(tl.where(is_key, x, LARGEST), 0)
    # A difference in 64 bits: scores have both signs.
    distance = tl.where(is_key, x.to(tl.int64) - lowest, 0)
    # Rounded up to the next float, if at all, so a float's exponent is at least that of the number.
    bits = (tl.max(distance, 0).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 126
    shift = tl.maximum(bits + spec.PLACE_BITS - 32, 0)
    n = tl.arange(0, spec.BK)
    # From the smallest int32 on.
    leading = (distance >> shift.to(tl.int64)) << spec.PLACE_BITS
    pair = (leading + (spec.BK - 1 - n) - 0x80000000).to(tl.int32)
    return spec.BK - 1 - (tl.sort(pair, descending=True) & (spec.BK - 1))


@triton.jit
def _order_pairs(places, selected_scores, place, n, partner, count, changes):
    """Puts places n and partner in order by their scores; returns the places, and a number above 0 for a change."""
    is_pair = (partner >= 0) & (partner < count) & (n < count)
    # Barriers around the stores: other threads read them.
    tl.debug_barrier()
    other = tl.load(places + partner, mask=is_pair, other=0)
    score = tl.load(selected_scores + place, mask=n < count, other=0)
    other_score = tl.load(selected_scores + other, mask=is_pair, other=0)
    other_is_first = (other_score > score) | ((other_score == score) & (other < place))
    is_changed = is_pair & (other_is_first == (n < partner))
    place = tl.where(is_changed, other, place)
    tl.debug_barrier()
    tl.store(places + n, place, mask=is_changed)
    return place, changes + tl.sum(is_changed.to(tl.int32), 0)
