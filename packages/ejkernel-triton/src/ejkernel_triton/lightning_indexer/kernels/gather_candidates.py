"""Gathers the scores of each row that are above a guess, or its K largest where the guess is wrong; see
`guess_threshold`.
"""

import triton
import triton.language as tl

from ejkernel_triton.blocks import batch_row_address
from ejkernel_triton.lightning_indexer.kernels.rows import (
    BELOW_SCORES,
    LARGEST,
    NO_SCORE,
    load_key_range,
    mean_without_overflow,
)


@triton.jit
def gather_candidates_kernel(
    ordered_scores,
    key_starts,
    key_ends,
    first_query,
    guesses,
    candidates,
    counts,
    spec: tl.constexpr,
    per: tl.constexpr,
    CANDIDATES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Stores at most CANDIDATES scores of one row and their keys, [2, CANDIDATES], and how many there are."""
    row, batch = tl.program_id(0) % spec.CHUNK, tl.cast(tl.program_id(0) // spec.CHUNK, tl.int64)
    start, num_keys = load_key_range(key_starts, key_ends, first_query, row, batch, per, spec)
    ordered_scores = batch_row_address(ordered_scores, batch, per.ORDERED_SCORES, spec.CHUNK * spec.S)
    row_scores = ordered_scores + tl.cast(row, tl.int64) * spec.S + start
    candidates += (batch * spec.CHUNK + row) * (2 * CANDIDATES)
    guess = tl.load(batch_row_address(guesses, batch, per.GUESSES, spec.CHUNK) + row)
    count = _store_above(row_scores, start, num_keys, guess, 0, candidates, CANDIDATES, TILE, False)
    if (num_keys > CANDIDATES) & ((count < spec.K) | (count > CANDIDATES)):
        threshold, num_ties = _bisect_row(row_scores, num_keys, guess, count, spec, TILE)
        # Barrier: what the first pass stored is overwritten.
        tl.debug_barrier()
        count = _store_above(row_scores, start, num_keys, threshold, num_ties, candidates, CANDIDATES, TILE, True)
    tl.store(counts + batch * spec.CHUNK + row, count)


@triton.jit
def _bisect_row(row_scores, num_keys, guess, num_above_guess, spec: tl.constexpr, TILE: tl.constexpr):
    """Returns the threshold above which the row's scores are selected, and how many that equal it."""
    is_too_high = num_above_guess < spec.K
    low = tl.where(is_too_high, BELOW_SCORES, guess)
    high = tl.where(is_too_high, guess, LARGEST)
    above = tl.where(is_too_high, num_above_guess, 0)
    while low + 1 < high:
        middle = mean_without_overflow(low, high)
        tile_counts = tl.zeros([TILE], tl.int32)
        for first in tl.range(0, num_keys, TILE):
            i = first + tl.arange(0, TILE)
            tile_counts += (tl.load(row_scores + i, mask=i < num_keys, other=NO_SCORE) > middle).to(tl.int32)
        num_above = tl.sum(tile_counts, 0)
        low = tl.where(num_above < spec.K, low, middle)
        high = tl.where(num_above < spec.K, middle, high)
        above = tl.where(num_above < spec.K, num_above, above)
    return high, spec.K - above


@triton.jit
def _store_above(
    row_scores,
    start,
    num_keys,
    threshold,
    num_ties,
    candidates,
    CANDIDATES: tl.constexpr,
    TILE: tl.constexpr,
    HAS_TIES: tl.constexpr,
):
    """Stores the scores of a row above a threshold and, if HAS_TIES, the first `num_ties` that equal it, in order, with
    their keys; returns how many there are, of which the first CANDIDATES are stored.
    """
    count, earlier_ties = 0, 0
    n = tl.arange(0, TILE)
    next_x = tl.load(row_scores + n, mask=n < num_keys, other=NO_SCORE)
    for first in tl.range(0, num_keys, TILE):
        i, x = first + n, next_x
        # Ahead of the sums, which wait for all threads of the program.
        next_x = tl.load(row_scores + i + TILE, mask=i + TILE < num_keys, other=NO_SCORE)
        is_kept = x > threshold
        if HAS_TIES:
            is_tie = (x == threshold).to(tl.int32)
            is_kept = is_kept | ((is_tie > 0) & (earlier_ties + tl.cumsum(is_tie, 0) <= num_ties))
            earlier_ties += tl.sum(is_tie, 0)
        kept = is_kept.to(tl.int32)
        slot = count + tl.cumsum(kept, 0) - 1
        is_stored = is_kept & (slot < CANDIDATES)
        tl.store(candidates + slot, x, mask=is_stored)
        tl.store(candidates + CANDIDATES + slot, start + i, mask=is_stored)
        count += tl.sum(kept, 0)
    return count
