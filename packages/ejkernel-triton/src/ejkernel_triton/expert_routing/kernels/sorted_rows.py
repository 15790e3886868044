"""Computes the sorted row of every pair of a token and an expert; see `topk`."""

import triton
import triton.language as tl

from ejkernel_triton.blocks import at_batch


@triton.jit
def sorted_rows_kernel(experts, ranks, sums, sizes, places, order, spec: tl.constexpr, per: tl.constexpr):
    """Stores the rows of the pairs of BLOCK_T tokens, and for those rows the pair."""
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
