"""Sorts the selected keys of each query by descending score, and equal scores by index."""

import triton
import triton.language as tl

from ejkernel_triton.blocks import batch_row_address
from ejkernel_triton.lightning_indexer.kernels.ordered_integers import NO_SCORE, floats_of_integers


@triton.jit
def sort_selected_kernel(
    selected_indices,
    selected_scores,
    key_starts,
    key_ends,
    first_query,
    indices,
    scores,
    spec: tl.constexpr,
    per: tl.constexpr,
):
    """Sorts the selection of one query; -1 and -inf where it has fewer than K keys."""
    row, batch = tl.program_id(0) % spec.CHUNK, tl.cast(tl.program_id(0) // spec.CHUNK, tl.int64)
    token = tl.load(batch_row_address(first_query, batch, per.FIRST_QUERY, 1)) + row
    key_starts = batch_row_address(key_starts, batch, per.KEY_STARTS, spec.T)
    key_ends = batch_row_address(key_ends, batch, per.KEY_ENDS, spec.T)
    start = tl.load(key_starts + token, mask=token < spec.T, other=0)
    count = tl.load(key_ends + token, mask=token < spec.T, other=0) - start
    selected_indices = batch_row_address(selected_indices, batch, per.SELECTED_INDICES, spec.CHUNK * spec.K)
    selected_scores = batch_row_address(selected_scores, batch, per.SELECTED_SCORES, spec.CHUNK * spec.K)
    n = tl.arange(0, spec.BK)
    is_key = (n < count) & (n < spec.K)
    x = tl.load(selected_scores + row * spec.K + n, mask=is_key, other=NO_SCORE)
    index = tl.load(selected_indices + row * spec.K + n, mask=is_key, other=0)
    # One integer per key: the score in the upper half, the complement of the index in the lower one.
    pair = tl.sort((x.to(tl.int64) << 32) | (0x7FFFFFFF - index.to(tl.int64)), descending=True)
    x = (pair >> 32).to(tl.int32)
    index = (0x7FFFFFFF - (pair & 0xFFFFFFFF)).to(tl.int32)
    at = (batch * spec.CHUNK + row) * spec.K + n
    tl.store(indices + at, tl.where(is_key, index, -1), mask=n < spec.K)
    tl.store(scores + at, tl.where(is_key, floats_of_integers(x), float("-inf")), mask=n < spec.K)
