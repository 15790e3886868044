"""Computes the gradients of tokens: each gets a share of its pool's cotangent."""

import triton
import triton.language as tl

from ejkernel_triton.blocks import batch_row_address
from ejkernel_triton.segment_pooling.kernels.tile import count_entries_up_to, load_num_tokens, load_pool_range


@triton.jit
def pool_bwd_kernel(cotangent, lengths, ranges, gradient, spec: tl.constexpr, per: tl.constexpr):
    """Computes the gradients of BLOCK_T tokens: the pool's cotangent divided by its length; 0 for tokens without a
    pool.
    """
    TILES_PER_PROGRAM: tl.constexpr = spec.TILES_PER_PROGRAM
    program = tl.program_id(0)
    channel_program = program % spec.NUM_CHANNEL_PROGRAMS
    block = program // spec.NUM_CHANNEL_PROGRAMS % spec.NUM_BLOCKS
    row = tl.cast(program // (spec.NUM_CHANNEL_PROGRAMS * spec.NUM_BLOCKS), tl.int64)
    token = block * spec.BLOCK_T + tl.arange(0, spec.BLOCK_T)
    tokens = load_num_tokens(lengths, row, spec, per)
    if spec.HAS_RANGES:
        ranges = batch_row_address(ranges, row, per.RANGES, 2 * spec.M)
        pool = count_entries_up_to(ranges + 1, token, spec)  # number of pools that end at or before a token
    else:
        pool = token // spec.CHUNK_SIZE
    first_token, end = load_pool_range(ranges, pool, tokens, pool < spec.M, spec)
    in_pool = (pool < spec.M) & (first_token <= token) & (token < end)
    length = tl.cast(tl.maximum(end - first_token, 1), tl.float32)
    # 64 bits for a pool's address: tokens of one tile may read pools far from each other.
    source = batch_row_address(cotangent, row, per.COTANGENT, spec.M * spec.C) + tl.cast(pool, tl.int64) * spec.C
    target = gradient + (row * spec.T + token) * spec.C
    for step in tl.static_range(TILES_PER_PROGRAM):
        channels = (channel_program * TILES_PER_PROGRAM + step) * spec.BLOCK_C + tl.arange(0, spec.BLOCK_C)
        channel_mask = (channels < spec.C)[None, :]
        # Tokens of a pool read the same row of cotangents, after the first time from a cache.
        pool_cotangent = tl.load(
            source[:, None] + channels[None, :], mask=in_pool[:, None] & channel_mask, other=0.0
        ).to(tl.float32)
        # 0 for tokens without a pool: the load was masked, and the length is at least 1.
        token_gradient = (pool_cotangent / length[:, None]).to(gradient.dtype.element_ty)
        tl.store(target[:, None] + channels[None, :], token_gradient, mask=(token < spec.T)[:, None] & channel_mask)
