"""Top-k routing and a counting sort by expert, without atomics: results are reproducible bit for bit.

topk_kernel             BLOCK_T tokens per program: takes the largest remaining logit k times; counts the block's tokens
                        per expert, and for each pair the earlier tokens of the block with the same expert
expert_offsets_kernel   one program: sums of the counts of earlier blocks, and the first row of every expert
sorted_rows_kernel      row of a pair = first row of its expert + its pairs in earlier blocks + earlier pairs here

                    experts 0   1   2   3
counts  block 0     [   3   0   2   1 ]        sums before    [ 0 0 0 0 ]
        block 1     [   1   2   2   1 ]    ->                 [ 3 0 2 1 ]      first rows  0 4 6 10
"""

import triton
import triton.language as tl

from ejkernel_triton.blocks import batch_row_address


@triton.jit
def topk_kernel(logits, experts, indices_within_block_and_expert, block_counts, spec: tl.constexpr, per: tl.constexpr):
    """Selects the experts of BLOCK_T tokens, the largest logit first; of equal logits the first expert comes first."""
    T: tl.constexpr = spec.BLOCK_T
    E: tl.constexpr = spec.PADDED_E
    K: tl.constexpr = spec.PADDED_K
    TOP_K: tl.constexpr = spec.K
    block = tl.program_id(0) % spec.NUM_BLOCKS
    batch = tl.cast(tl.program_id(0) // spec.NUM_BLOCKS, tl.int64)
    logits = batch_row_address(logits, batch, per.LOGITS, spec.T * spec.E)
    token = block * T + tl.arange(0, T)
    expert = tl.arange(0, E)
    is_real_logit = (token < spec.T)[:, None] & (expert < spec.E)[None, :]
    at = tl.cast(token, tl.int64)[:, None] * spec.E + expert[None, :]
    x = tl.load(logits + at, mask=is_real_logit, other=float("-inf")).to(tl.float32)
    # Integers with the order of the logits, as `ejkernel.families.expert_routing.ordered` defines it: -0 equals 0, and
    # NaN is the largest. Comparisons with NaN would be false, so that no expert would be selected.
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    key = tl.where(magnitude > 0x7F800000, 0x7FFFFFFF, tl.where(bits < 0, -magnitude, magnitude))
    is_remaining = tl.broadcast_to((expert < spec.E)[None, :], [T, E])
    n = tl.arange(0, K)
    chosen_experts = tl.full([T, K], 0, tl.int32)
    for step in tl.static_range(TOP_K):
        # The smallest integer stands for a removed logit; no logit maps to it.
        max_key = tl.max(tl.where(is_remaining, key, -0x80000000), axis=1)
        best_expert = tl.min(tl.where(is_remaining & (key == max_key[:, None]), expert[None, :], E), axis=1)
        chosen_experts = tl.where(n[None, :] == step, best_expert[:, None], chosen_experts)
        is_remaining = is_remaining & (expert[None, :] != best_expert[:, None])
    is_real_pair = (token < spec.T)[:, None] & (n < spec.K)[None, :]
    pair = token[:, None] * spec.K + n[None, :]
    tl.store(experts + batch * spec.T * spec.K + pair, chosen_experts, mask=is_real_pair)
    # A token has an expert at most once, so the pairs of an expert are ordered by token.
    is_chosen = ((expert < spec.E)[None, :] & (is_remaining == 0) & (token < spec.T)[:, None]).to(tl.int32)
    earlier_token_counts = tl.cumsum(is_chosen, axis=0) - is_chosen
    index_within_expert = tl.full([T, K], 0, tl.int32)
    for step in tl.static_range(TOP_K):
        best_expert = tl.sum(tl.where(n[None, :] == step, chosen_experts, 0), axis=1)
        num_earlier_tokens = tl.sum(tl.where(expert[None, :] == best_expert[:, None], earlier_token_counts, 0), axis=1)
        index_within_expert = tl.where(n[None, :] == step, num_earlier_tokens[:, None], index_within_expert)
    tl.store(indices_within_block_and_expert + batch * spec.T * spec.K + pair, index_within_expert, mask=is_real_pair)
    block_counts += (batch * spec.NUM_BLOCKS + block) * E
    tl.store(block_counts + expert, tl.sum(is_chosen, axis=0))
