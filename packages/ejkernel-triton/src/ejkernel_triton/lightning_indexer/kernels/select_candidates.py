"""Selects the K largest of the candidates of each row, of equal ones the first; see `guess_threshold`."""

import triton
import triton.language as tl

from ejkernel_triton.blocks import batch_row_address
from ejkernel_triton.lightning_indexer.kernels.rows import BELOW_SCORES, LARGEST, NO_SCORE, bisect


@triton.jit
def select_candidates_kernel(
    candidates,
    counts,
    selected_scores,
    selected_keys,
    spec: tl.constexpr,
    per: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """Stores the selection of one row in the order of keys, [K]; with fewer candidates, all of them first."""
    row, batch = tl.program_id(0) % spec.CHUNK, tl.cast(tl.program_id(0) // spec.CHUNK, tl.int64)
    candidates = batch_row_address(candidates, batch, per.CANDIDATES, spec.CHUNK * 2 * CANDIDATES)
    candidates += tl.cast(row, tl.int64) * (2 * CANDIDATES)
    count = tl.load(batch_row_address(counts, batch, per.COUNTS, spec.CHUNK) + row)
    c = tl.arange(0, CANDIDATES)
    x = tl.load(candidates + c, mask=c < count, other=NO_SCORE)
    threshold, num_ties = tl.full([], BELOW_SCORES, tl.int32), tl.full([], 0, tl.int32)
    if count > spec.K:
        lowest = tl.min(tl.where(x == NO_SCORE, LARGEST, x), 0)
        _, threshold, above = bisect(x, lowest - 1, tl.max(x, 0), spec.K, spec.K)
        num_ties = spec.K - above
    is_tie = (x == threshold).to(tl.int32)
    is_selected = (x > threshold) | ((is_tie > 0) & (tl.cumsum(is_tie, 0) <= num_ties))
    at = (batch * spec.CHUNK + row) * spec.K + tl.cumsum(is_selected.to(tl.int32), 0) - 1
    tl.store(selected_scores + at, x, mask=is_selected)
    tl.store(selected_keys + at, tl.load(candidates + CANDIDATES + c, mask=is_selected), mask=is_selected)
