"""Computes the sorted row of every pair of a token and an expert; see `topk`."""

import triton
import triton.language as tl

from ejkernel_triton.blocks import batch_row_address


@triton.jit
def sorted_rows_kernel(
    experts,
    indices_within_block_and_expert,
    earlier_block_counts,
    group_sizes,
    sorted_positions,
    sorted_pairs,
    spec: tl.constexpr,
    per: tl.constexpr,
):
    """Stores the rows of the pairs of BLOCK_T tokens, and for those rows the pair."""
    T: tl.constexpr = spec.BLOCK_T
    E: tl.constexpr = spec.PADDED_E
    TOP_K: tl.constexpr = spec.K
    block = tl.program_id(0) % spec.NUM_BLOCKS
    batch = tl.cast(tl.program_id(0) // spec.NUM_BLOCKS, tl.int64)
    experts = batch_row_address(experts, batch, per.EXPERTS, spec.T * spec.K)
    indices_within_block_and_expert = batch_row_address(
        indices_within_block_and_expert, batch, per.INDICES_WITHIN_BLOCK_AND_EXPERT, spec.T * spec.K
    )
    earlier_block_counts = (
        batch_row_address(earlier_block_counts, batch, per.EARLIER_BLOCK_COUNTS, spec.NUM_BLOCKS * E) + block * E
    )
    group_sizes = batch_row_address(group_sizes, batch, per.GROUP_SIZES, spec.E)
    sorted_positions += batch * spec.T * spec.K
    sorted_pairs += batch * spec.T * spec.K
    token = block * T + tl.arange(0, T)
    expert_ids = tl.arange(0, E)
    group_size = tl.load(group_sizes + expert_ids, mask=expert_ids < spec.E, other=0)
    first_row = tl.cumsum(group_size, axis=0) - group_size
    for n in tl.static_range(TOP_K):
        pair = token * spec.K + n
        expert = tl.load(experts + pair, mask=token < spec.T, other=0)
        sorted_position = tl.load(indices_within_block_and_expert + pair, mask=token < spec.T, other=0)
        sorted_position += tl.load(earlier_block_counts + expert, mask=token < spec.T, other=0)
        sorted_position += tl.sum(tl.where(expert[:, None] == expert_ids[None, :], first_row[None, :], 0), axis=1)
        tl.store(sorted_positions + pair, sorted_position, mask=token < spec.T)
        tl.store(sorted_pairs + sorted_position, pair, mask=token < spec.T)
