"""Sorts the selected keys of each query by descending score, and equal scores by key."""

import triton
import triton.language as tl

from ejkernel_triton.blocks import batch_row_address
from ejkernel_triton.lightning_indexer.kernels.ordered_integers import floats_of_integers
from ejkernel_triton.lightning_indexer.kernels.rows import NO_SCORE


@triton.jit
def sort_selected_kernel(
    selected_scores, selected_keys, counts, indices, scores, spec: tl.constexpr, per: tl.constexpr
):
    """Sorts the selection of one query; -1 and -inf where it has fewer than K keys."""
    row = tl.cast(tl.program_id(0) % spec.CHUNK, tl.int64)
    batch = tl.cast(tl.program_id(0) // spec.CHUNK, tl.int64)
    count = tl.load(batch_row_address(counts, batch, per.COUNTS, spec.CHUNK) + row)
    n = tl.arange(0, spec.BK)
    is_key = (n < count) & (n < spec.K)
    selected_scores = batch_row_address(selected_scores, batch, per.SELECTED_SCORES, spec.CHUNK * spec.K)
    selected_keys = batch_row_address(selected_keys, batch, per.SELECTED_KEYS, spec.CHUNK * spec.K)
    x = tl.load(selected_scores + row * spec.K + n, mask=is_key, other=NO_SCORE)
    key = tl.load(selected_keys + row * spec.K + n, mask=is_key, other=0)
    # One integer per key: the score in the upper half, the complement of the key's index in the lower one.
    pair = tl.sort((x.to(tl.int64) << 32) | (0x7FFFFFFF - key.to(tl.int64)), descending=True)
    x = (pair >> 32).to(tl.int32)
    key = (0x7FFFFFFF - (pair & 0xFFFFFFFF)).to(tl.int32)
    at = (batch * spec.CHUNK + row) * spec.K + n
    tl.store(indices + at, tl.where(is_key, key, -1), mask=n < spec.K)
    tl.store(scores + at, tl.where(is_key, floats_of_integers(x), float("-inf")), mask=n < spec.K)
