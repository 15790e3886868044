# pyright: basic, reportIndexIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalMemberAccess=false, reportGeneralTypeIssues=false
"""Segment pooling: every token of a pool is read once, and its gradient written once; both are bound by memory.

    tokens     |------ block 0 ------|------ block 1 ------|------ block 2 ------|
    pools      [ a ][    b    ][          c                                ][ d ]
    pools_kernel    a, b: means         head of c             head of c, d: mean      a program a block and
                    tail of c                                                         tile of channels
    combine_kernel  c = (tail + head + head) / length                                 a program a pool and tile

Blocks have equally many tokens, however long pools are, so programs have equal work. What lies in one block is finished
there. A pool that crosses blocks leaves a float32 sum in each: the tail of the block in which it begins, the heads of
those that it goes on in. The second kernel adds them in order: no atomics, so two runs give the same bits.

Pools are disjoint and in order, so the pools of a block are found by two searches, and that of a token by one.
"""

import triton
import triton.language as tl

from ejkernel_triton.blocks import at_batch


@triton.jit
def count_up_to(column, bound, spec: tl.constexpr):
    """How many pools have a number up to `bound` in a column of `ranges`; of a vector of bounds, each."""
    LEVELS: tl.constexpr = spec.LEVELS
    found = bound * 0
    # A binary search without branches, so that a vector of bounds can take every step together. Loads depend on each
    # other, one a bit of the number of pools.
    for level in tl.static_range(LEVELS):
        step = spec.STEP >> level
        in_range = found + step <= spec.M
        # Ranges are pairs, so a column's numbers are 2 apart. Behind the last pool nothing is loaded.
        last = tl.load(column + 2 * (found + step - 1), mask=in_range, other=0)
        found = tl.where(in_range & (last <= bound), found + step, found)
    return found


@triton.jit
def pools_between(ranges, start, last, spec: tl.constexpr):
    """How many pools end at or before the token `start`, and how many begin at or before the token `last`."""
    WAYS: tl.constexpr = spec.WAYS
    WIDE_LEVELS: tl.constexpr = spec.WIDE_LEVELS
    ways = tl.arange(0, WAYS) + 1
    ended, begun = tl.cast(start * 0, tl.int32), tl.cast(start * 0, tl.int32)
    # A step of the search looks at WAYS pools at once: a program waits for memory once for up to WAYS pools, twice for
    # WAYS * WAYS, where a binary search would wait once a bit, and for both columns together.
    for level in tl.static_range(WIDE_LEVELS):
        stride = WAYS ** (WIDE_LEVELS - 1 - level)
        end_at, begin_at = ended + ways * stride - 1, begun + ways * stride - 1
        ends = tl.load(ranges + 2 * end_at + 1, mask=end_at < spec.M, other=0)
        begins = tl.load(ranges + 2 * begin_at, mask=begin_at < spec.M, other=0)
        ended += stride * tl.sum(tl.where((end_at < spec.M) & (ends <= start), 1, 0), axis=0)
        begun += stride * tl.sum(tl.where((begin_at < spec.M) & (begins <= last), 1, 0), axis=0)
    return ended, begun


@triton.jit
def tokens_of(lengths, row, spec: tl.constexpr, per: tl.constexpr):
    """How many tokens of a row count."""
    if spec.LENGTHS:
        return tl.load(lengths + row // per.LENGTHS)
    else:
        return tl.cast(row * 0 + spec.T, tl.int32)


@triton.jit
def span_of(ranges, pool, tokens, in_range, spec: tl.constexpr):
    """First token of a pool, or of each of a vector of them, and the token after its last."""
    if spec.RANGES:
        first = tl.load(ranges + 2 * pool, mask=in_range, other=0)
        return first, tl.load(ranges + 2 * pool + 1, mask=in_range, other=0)
    else:
        return tl.minimum(pool * spec.CHUNK, tokens), tl.minimum((pool + 1) * spec.CHUNK, tokens)


@triton.jit
def load_rows(values, token, end, channels, spec: tl.constexpr):
    """[BLOCK_T, BLOCK_C] of the tokens from `token` on; 0 from `end` on."""
    rows = tl.arange(0, spec.BLOCK_T)
    # 64 bits for where the rows begin, 32 for where an element is in them.
    start = values + tl.cast(token, tl.int64) * spec.C
    mask = (token + rows < end)[:, None] & (channels < spec.C)[None, :]
    return tl.load(start + (rows[:, None] * spec.C + channels[None, :]), mask=mask, other=0.0)


@triton.jit
def sum_rows(values, first, end, channels, spec: tl.constexpr):
    """[BLOCK_C] float32, the sum of tokens from `first` up to `end`."""
    BLOCK_T: tl.constexpr = spec.BLOCK_T
    BLOCK_C: tl.constexpr = spec.BLOCK_C
    # BLOCK_T rows of partial sums: their loads are independent, and one reduction follows the loop.
    acc = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    if spec.PREFETCH:
        # Carried through the loop: the next tile is under way while this one is added, so that a program always has
        # loads in flight. Behind the last tile every row is masked.
        tile = load_rows(values, first, end, channels, spec)
        for token in tl.range(first, end, spec.BLOCK_T):
            next_tile = load_rows(values, token + BLOCK_T, end, channels, spec)
            acc += tile.to(tl.float32)
            tile = next_tile
    else:
        for token in tl.range(first, end, spec.BLOCK_T):
            acc += load_rows(values, token, end, channels, spec).to(tl.float32)
    return tl.sum(acc, axis=0)


@triton.jit
def pools_kernel(values, lengths, ranges, output, sums, spec: tl.constexpr, per: tl.constexpr):
    """The pools of one block of tokens: means of those that lie in it, sums [BLOCKS, 2, C] of those that cross it."""
    program = tl.program_id(0)
    tile = program % spec.TILES
    block = program // spec.TILES % spec.BLOCKS
    row = tl.cast(program // (spec.TILES * spec.BLOCKS), tl.int64)
    channels = tile * spec.BLOCK_C + tl.arange(0, spec.BLOCK_C)
    values = at_batch(values, row, per.VALUES, spec.T * spec.C)
    output += row * (spec.M * spec.C)
    sums += (row * spec.BLOCKS + block) * (2 * spec.C)
    start, behind = block * spec.SPAN, (block + 1) * spec.SPAN
    tokens = tokens_of(lengths, row, spec, per)
    if spec.RANGES:
        ranges = at_batch(ranges, row, per.RANGES, 2 * spec.M)
        # From the first pool that ends behind the block's first token to the last that begins before its end.
        pool, last = pools_between(ranges, start, behind - 1, spec)
    else:
        # Chunks that go on from the block before, or into the next one, are among them.
        pool, last = start // spec.CHUNK, tl.minimum((behind + spec.CHUNK - 1) // spec.CHUNK, spec.M)
    for m in tl.range(pool, last):
        first, end = span_of(ranges, m, tokens, m >= 0, spec)
        # Clipped to the block: no token is read by two programs of one tile of channels.
        acc = sum_rows(values, tl.maximum(first, start), tl.minimum(end, behind), channels, spec)
        channel_mask = channels < spec.C
        # Pools without tokens are whole: their mean is 0 over a length of at least 1.
        whole = (end <= first) | ((first >= start) & (end <= behind))
        if whole:
            mean = acc / tl.cast(tl.maximum(end - first, 1), tl.float32)
            tl.store(
                output + tl.cast(m, tl.int64) * spec.C + channels, mean.to(output.dtype.element_ty), mask=channel_mask
            )
        else:
            # A block has at most one pool that goes on from the one before, and one that goes on into the next.
            tl.store(sums + tl.where(first >= start, spec.C, 0) + channels, acc, mask=channel_mask)


@triton.jit
def combine_kernel(sums, lengths, ranges, so_far, output, spec: tl.constexpr, per: tl.constexpr):
    """The means of pools that cross blocks, from their sums in the order of the blocks; 0 for pools without tokens.

    `output` is `so_far`: the same memory, whose other pools are as the first kernel left them.
    """
    program = tl.program_id(0)
    tile = program % spec.WIDE_TILES
    pool = program // spec.WIDE_TILES % spec.M
    row = tl.cast(program // (spec.WIDE_TILES * spec.M), tl.int64)
    channels = tile * spec.WIDE + tl.arange(0, spec.WIDE)
    if spec.RANGES:
        ranges = at_batch(ranges, row, per.RANGES, 2 * spec.M)
    first, end = span_of(ranges, pool, tokens_of(lengths, row, spec, per), pool >= 0, spec)
    # Every program looks at its pool, and most find that it crosses no block and write nothing.
    begins, ends = first // spec.SPAN, (end - 1) // spec.SPAN
    crosses = (end > first) & (ends > begins)
    sums = at_batch(sums, row, per.SUMS, spec.BLOCKS * 2 * spec.C)
    AT_ONCE: tl.constexpr = spec.AT_ONCE
    WIDE: tl.constexpr = spec.WIDE
    blocks = tl.arange(0, AT_ONCE)
    acc = tl.zeros([AT_ONCE, WIDE], tl.float32)
    for block in tl.range(begins, tl.where(crosses, ends + 1, begins), spec.AT_ONCE):
        # Two sums a block: slot 1 is the tail of the block in which the pool begins, slot 0 the head of each later one.
        part = 2 * (block + blocks) + tl.where(block + blocks == begins, 1, 0)
        mask = (block + blocks <= ends)[:, None] & (channels < spec.C)[None, :]
        acc += tl.load(sums + (tl.cast(part, tl.int64)[:, None] * spec.C + channels[None, :]), mask=mask, other=0.0)
    # Empty pools too: the first kernel reaches none that lies at a block's first token.
    if crosses | (end <= first):
        mean = tl.sum(acc, axis=0) / tl.cast(tl.maximum(end - first, 1), tl.float32)
        at = output + (row * spec.M + pool) * spec.C + channels
        tl.store(at, mean.to(output.dtype.element_ty), mask=channels < spec.C)


@triton.jit
def shares_kernel(cotangent, lengths, ranges, gradient, spec: tl.constexpr, per: tl.constexpr):
    """The gradients of BLOCK_T tokens: their pools' cotangents by the pools' lengths; 0 for tokens of no pool."""
    STEPS: tl.constexpr = spec.STEPS
    program = tl.program_id(0)
    group = program % spec.GROUPS
    block = program // spec.GROUPS % spec.BLOCKS
    row = tl.cast(program // (spec.GROUPS * spec.BLOCKS), tl.int64)
    token = block * spec.BLOCK_T + tl.arange(0, spec.BLOCK_T)
    tokens = tokens_of(lengths, row, spec, per)
    if spec.RANGES:
        ranges = at_batch(ranges, row, per.RANGES, 2 * spec.M)
        pool = count_up_to(ranges + 1, token, spec)  # pools that end at or before a token
    else:
        pool = token // spec.CHUNK
    first, end = span_of(ranges, pool, tokens, pool < spec.M, spec)
    in_pool = (pool < spec.M) & (first <= token) & (token < end)
    length = tl.cast(tl.maximum(end - first, 1), tl.float32)
    # 64 bits for a pool's row: tokens of one tile may read pools far from each other.
    source = at_batch(cotangent, row, per.COTANGENT, spec.M * spec.C) + tl.cast(pool, tl.int64) * spec.C
    target = gradient + (row * spec.T + token) * spec.C
    for step in tl.static_range(STEPS):
        channels = (group * STEPS + step) * spec.BLOCK_C + tl.arange(0, spec.BLOCK_C)
        channel_mask = (channels < spec.C)[None, :]
        # Tokens of a pool read the same row of cotangents: after the first, from a cache.
        dpool = tl.load(source[:, None] + channels[None, :], mask=in_pool[:, None] & channel_mask, other=0.0).to(
            tl.float32
        )
        # 0 for tokens of no pool: the load was masked, and the length is at least 1.
        share = (dpool / length[:, None]).to(gradient.dtype.element_ty)
        tl.store(target[:, None] + channels[None, :], share, mask=(token < spec.T)[:, None] & channel_mask)
