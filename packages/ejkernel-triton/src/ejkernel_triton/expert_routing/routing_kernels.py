# pyright: basic, reportIndexIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalMemberAccess=false, reportGeneralTypeIssues=false
"""Top-k routing and the sort by expert, a counting sort without atomics: every run gives the same bits.

choose_kernel    BLOCK_T tokens a program: k times the largest logit that is left; how many of the block's tokens
                 chose each expert, and for each pair how many tokens of the block before chose its expert
offsets_kernel   one program: sums of the counts of the blocks before, and the first row of every expert
places_kernel    row of a pair = first row of its expert + pairs of blocks before + pairs of this block before

                    experts 0   1   2   3
counts  block 0     [   3   0   2   1 ]        sums before    [ 0 0 0 0 ]
        block 1     [   1   2   2   1 ]    ->                 [ 3 0 2 1 ]      first rows  0 4 6 10
"""

import triton
import triton.language as tl

from ejkernel_triton.blocks import at_batch


@triton.jit
def choose_kernel(logits, experts, ranks, counts, spec: tl.constexpr, per: tl.constexpr):
    """The experts of BLOCK_T tokens, the larger logit first, of equal ones the first."""
    T: tl.constexpr = spec.BLOCK_T
    E: tl.constexpr = spec.PADDED_E
    K: tl.constexpr = spec.PADDED_K
    COUNT: tl.constexpr = spec.K
    block = tl.program_id(0) % spec.BLOCKS
    batch = tl.cast(tl.program_id(0) // spec.BLOCKS, tl.int64)
    logits = at_batch(logits, batch, per.LOGITS, spec.T * spec.E)
    token = block * T + tl.arange(0, T)
    expert = tl.arange(0, E)
    real = (token < spec.T)[:, None] & (expert < spec.E)[None, :]
    at = tl.cast(token, tl.int64)[:, None] * spec.E + expert[None, :]
    x = tl.load(logits + at, mask=real, other=float("-inf")).to(tl.float32)
    # Integers in the order of the logits, as `ejkernel.families.expert_routing.ordered` defines it: -0 equals 0, NaN is
    # the largest. Comparisons with NaN would be false, and then no expert would be found.
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    key = tl.where(magnitude > 0x7F800000, 0x7FFFFFFF, tl.where(bits < 0, -magnitude, magnitude))
    left = tl.broadcast_to((expert < spec.E)[None, :], [T, E])
    n = tl.arange(0, K)
    chosen = tl.full([T, K], 0, tl.int32)
    for step in tl.static_range(COUNT):
        # No logit has the smallest integer.
        largest = tl.max(tl.where(left, key, -0x80000000), axis=1)
        found = tl.min(tl.where(left & (key == largest[:, None]), expert[None, :], E), axis=1)
        chosen = tl.where(n[None, :] == step, found[:, None], chosen)
        left = left & (expert[None, :] != found[:, None])
    used = (token < spec.T)[:, None] & (n < spec.K)[None, :]
    pair = token[:, None] * spec.K + n[None, :]
    tl.store(experts + batch * spec.T * spec.K + pair, chosen, mask=used)
    # A token has an expert once, so pairs of an expert are in the order of tokens.
    hot = ((expert < spec.E)[None, :] & (left == 0) & (token < spec.T)[:, None]).to(tl.int32)
    before = tl.cumsum(hot, axis=0) - hot
    rank = tl.full([T, K], 0, tl.int32)
    for step in tl.static_range(COUNT):
        found = tl.sum(tl.where(n[None, :] == step, chosen, 0), axis=1)
        earlier = tl.sum(tl.where(expert[None, :] == found[:, None], before, 0), axis=1)
        rank = tl.where(n[None, :] == step, earlier[:, None], rank)
    tl.store(ranks + batch * spec.T * spec.K + pair, rank, mask=used)
    counts += (batch * spec.BLOCKS + block) * E
    tl.store(counts + expert, tl.sum(hot, axis=0))


@triton.jit
def offsets_kernel(counts, sums, sizes, spec: tl.constexpr, per: tl.constexpr):
    """Exclusive sums over blocks of BLOCK_E experts, BLOCK_B blocks at a time, and the sizes."""
    B: tl.constexpr = spec.BLOCK_B
    BLOCK_E: tl.constexpr = spec.BLOCK_E
    E: tl.constexpr = spec.PADDED_E
    tile = tl.program_id(0) % (E // BLOCK_E)
    batch = tl.cast(tl.program_id(0) // (E // BLOCK_E), tl.int64)
    counts = at_batch(counts, batch, per.COUNTS, spec.BLOCKS * E)
    sums += batch * spec.BLOCKS * E
    expert = tile * BLOCK_E + tl.arange(0, BLOCK_E)
    total = tl.full([BLOCK_E], 0, tl.int32)
    for start in tl.range(0, spec.BLOCKS, B):
        block = start + tl.arange(0, B)
        at = block[:, None] * E + expert[None, :]
        mask = (block < spec.BLOCKS)[:, None]
        count = tl.load(counts + at, mask=mask, other=0)
        tl.store(sums + at, tl.cumsum(count, axis=0) - count + total[None, :], mask=mask)
        total += tl.sum(count, axis=0)
    tl.store(sizes + batch * spec.E + expert, total, mask=expert < spec.E)


@triton.jit
def places_kernel(experts, ranks, sums, sizes, places, order, spec: tl.constexpr, per: tl.constexpr):
    """The rows of the pairs of BLOCK_T tokens, and the pairs of those rows."""
    T: tl.constexpr = spec.BLOCK_T
    E: tl.constexpr = spec.PADDED_E
    COUNT: tl.constexpr = spec.K
    block = tl.program_id(0) % spec.BLOCKS
    batch = tl.cast(tl.program_id(0) // spec.BLOCKS, tl.int64)
    experts = at_batch(experts, batch, per.EXPERTS, spec.T * spec.K)
    ranks = at_batch(ranks, batch, per.RANKS, spec.T * spec.K)
    sums = at_batch(sums, batch, per.SUMS, spec.BLOCKS * E) + block * E
    sizes = at_batch(sizes, batch, per.SIZES, spec.E)
    places += batch * spec.T * spec.K
    order += batch * spec.T * spec.K
    token = block * T + tl.arange(0, T)
    every = tl.arange(0, E)
    size = tl.load(sizes + every, mask=every < spec.E, other=0)
    first = tl.cumsum(size, axis=0) - size
    for n in tl.static_range(COUNT):
        pair = token * spec.K + n
        expert = tl.load(experts + pair, mask=token < spec.T, other=0)
        place = tl.load(ranks + pair, mask=token < spec.T, other=0)
        place += tl.load(sums + expert, mask=token < spec.T, other=0)
        place += tl.sum(tl.where(expert[:, None] == every[None, :], first[None, :], 0), axis=1)
        tl.store(places + pair, place, mask=token < spec.T)
        tl.store(order + place, pair, mask=token < spec.T)
