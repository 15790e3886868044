"""Guesses a score that about TARGET keys of each row are above, from a sample of the row.

The three kernels of the selection, which are exact whatever the guess is:

    row of scores --sample--> guess                                                       guess_threshold
    row of scores --one pass--> scores above it, in the order of keys: candidates         gather_candidates
        fewer than K, or too many --> bisect the whole row --> its K largest              gather_candidates
    candidates (registers) --bisect--> threshold --> K selected, in the order of keys     select_candidates

Bisection counts the scores above a threshold; it halves an interval of integers, so 32 counts are enough. There are no
atomics. `sort_selected` sorts what is selected.
"""

import triton
import triton.language as tl

from ejkernel_triton.blocks import batch_row_address
from ejkernel_triton.lightning_indexer.kernels.rows import BELOW_SCORES, bisect, load_key_range


@triton.jit
def guess_threshold_kernel(
    ordered_scores,
    key_starts,
    key_ends,
    first_query,
    guesses,
    spec: tl.constexpr,
    per: tl.constexpr,
    CANDIDATES: tl.constexpr,
    TARGET: tl.constexpr,
):
    """Stores the guess of one row: below all scores where the row has at most CANDIDATES keys, which is also the number
    of scores in a sample.
    """
    row, batch = tl.program_id(0) % spec.CHUNK, tl.cast(tl.program_id(0) // spec.CHUNK, tl.int64)
    start, count = load_key_range(key_starts, key_ends, first_query, row, batch, per, spec)
    guess = tl.full([], BELOW_SCORES, tl.int32)
    if count > CANDIDATES:
        ordered_scores = batch_row_address(ordered_scores, batch, per.ORDERED_SCORES, spec.CHUNK * spec.S)
        row_scores = ordered_scores + tl.cast(row, tl.int64) * spec.S + start
        # The sample consists of groups of eight neighbouring scores: single scores would fetch as many memory sectors
        # as the whole row.
        i = tl.arange(0, CANDIDATES)
        x = tl.load(row_scores + (i // 8).to(tl.int64) * count // (CANDIDATES // 8) + i % 8)
        rank = tl.maximum(tl.cast(tl.cast(TARGET, tl.int64) * CANDIDATES // count, tl.int32), 1)
        guess, _, _ = bisect(x, tl.min(x, 0) - 1, tl.max(x, 0), rank - rank // 16, rank + rank // 16)
    tl.store(guesses + batch * spec.CHUNK + row, guess)
