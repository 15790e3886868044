"""Selects blocks: sums the weights of blocks over the heads of a KV head, and takes the largest of each query.

    q [ROWS, BD]      per tile of blocks:  s = q K_c^T --> p = exp2(s - lse) --> sum over heads --> scratch [queries, M]
    (queries x heads)                                                            (one region per program, reused for
                                                                                  its next tile: it stays in L2)
    then, a few queries at a time:  scratch [few, M] --> N - 1 times: take the largest, the later one if equal

The log-sum-exp is that of the compressed branch, which ran before. No array of queries by blocks is stored: a program
has one scratch row for each query of a tile, and there are as many programs as are resident.
"""

import triton
import triton.language as tl

from ejkernel_triton.blocks import dot
from ejkernel_triton.selected_attention.kernels.tile import batch_row_address


@triton.jit
def block_topk_kernel(
    query,
    keys,
    log2_lse,
    current_blocks,
    q_segment_ids,
    block_segment_ids,
    indices,
    scratch,
    spec: tl.constexpr,
    per: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    QUERIES_PER_TILE: tl.constexpr,
    HEADS_PER_TILE: tl.constexpr,
    BLOCKS_PER_TILE: tl.constexpr,
    PADDED_NUM_BLOCKS: tl.constexpr,
    QUERIES_PER_TOPK: tl.constexpr,
):
    """Persistent kernel: NUM_PROGRAMS programs per batch row loop over its tiles of QUERIES_PER_TILE queries of every
    KV head.

    HEADS_PER_TILE is the group size padded to a power of two, BLOCKS_PER_TILE the blocks of a tile of scores, BM all
    blocks padded to a power of two that is no less, QUERIES_PER_TOPK the queries whose largest weights are selected at
    once.
    """
    program = tl.program_id(0) % NUM_PROGRAMS
    batch = tl.program_id(0) // NUM_PROGRAMS
    query = batch_row_address(query, batch, per.QUERY, spec.T * spec.H * spec.D)
    keys = batch_row_address(keys, batch, per.KEYS, spec.M * spec.HK * spec.D)
    log2_lse = batch_row_address(log2_lse, batch, per.LOG2_LSE, spec.T * spec.H)
    current_blocks = batch_row_address(current_blocks, batch, per.CURRENT_BLOCKS, spec.T)
    if spec.HAS_SEGMENTS:
        q_segment_ids = batch_row_address(q_segment_ids, batch, per.Q_SEGMENT_IDS, spec.T)
        block_segment_ids = batch_row_address(block_segment_ids, batch, per.BLOCK_SEGMENT_IDS, spec.M)
    indices += tl.cast(batch, tl.int64) * (spec.T * spec.HK * spec.NUM_LISTED_BLOCKS)
    scratch += tl.cast(tl.program_id(0), tl.int64) * (QUERIES_PER_TILE * PADDED_NUM_BLOCKS)
    TILES: tl.constexpr = (spec.T + QUERIES_PER_TILE - 1) // QUERIES_PER_TILE
    # An item is a tile of queries and a KV head.
    for work_item in tl.range(program, TILES * spec.HK, NUM_PROGRAMS):
        head = work_item // TILES
        first_query = (work_item % TILES) * QUERIES_PER_TILE
        token = first_query + tl.arange(0, QUERIES_PER_TILE)
        current_block = tl.load(current_blocks + token, mask=token < spec.T, other=-1)
        # No query of the tile can select a block from `end_block` on: those are not computed.
        end_block = tl.max(current_block, 0)
        q_and_block_segment_ids = (q_segment_ids, block_segment_ids)
        _store_block_weights(
            query,
            keys,
            log2_lse,
            q_and_block_segment_ids,
            scratch,
            head,
            first_query,
            current_block,
            end_block,
            spec,
            QUERIES_PER_TILE,
            HEADS_PER_TILE,
            BLOCKS_PER_TILE,
            PADDED_NUM_BLOCKS,
        )
        # Barrier: threads read scratch rows that others wrote. A second one follows, before the next tile overwrites
        # them.
        tl.debug_barrier()
        for first_scratch_row in tl.range(0, QUERIES_PER_TILE, QUERIES_PER_TOPK):
            _store_largest_blocks(
                current_blocks,
                scratch,
                indices,
                head,
                first_query + first_scratch_row,
                first_scratch_row,
                end_block,
                spec,
                BLOCKS_PER_TILE,
                PADDED_NUM_BLOCKS,
                QUERIES_PER_TOPK,
            )
        tl.debug_barrier()


@triton.jit
def _store_block_weights(
    query,
    keys,
    log2_lse,
    q_and_block_segment_ids,
    scratch,
    head,
    first_query,
    current_block,
    end_block,
    spec: tl.constexpr,
    QUERIES_PER_TILE: tl.constexpr,
    HEADS_PER_TILE: tl.constexpr,
    BLOCKS_PER_TILE: tl.constexpr,
    PADDED_NUM_BLOCKS: tl.constexpr,
):
    """Stores the summed weights of the blocks before each query's current one in its scratch row, -1 for the others."""
    q_segment_ids, block_segment_ids = q_and_block_segment_ids
    ROWS: tl.constexpr = QUERIES_PER_TILE * HEADS_PER_TILE
    d = tl.arange(0, spec.BD)
    row = tl.arange(0, ROWS)
    # Heads are the fast axis of the rows, so that a reshape separates them for the sum.
    token, group_head = first_query + row // HEADS_PER_TILE, row % HEADS_PER_TILE
    valid = (token < spec.T) & (group_head < spec.G)
    q_row = tl.cast(token * spec.H + head * spec.G + group_head, tl.int64)
    in_row = (d < spec.D)[None, :]
    q = tl.load(query + q_row[:, None] * spec.D + d[None, :], mask=valid[:, None] & in_row, other=0.0)
    lse = tl.load(log2_lse + q_row, mask=valid, other=0.0)
    tokens = first_query + tl.arange(0, QUERIES_PER_TILE)
    for tile in tl.range(0, (end_block + BLOCKS_PER_TILE - 1) // BLOCKS_PER_TILE):
        block = tile * BLOCKS_PER_TILE + tl.arange(0, BLOCKS_PER_TILE)
        at = keys + (block * spec.HK + head)[:, None] * spec.D + d[None, :]
        k = tl.load(at, mask=(block < spec.M)[:, None] & in_row, other=0.0)
        weights = tl.exp2(dot(q, tl.trans(k), spec) * spec.LOG2_SCORE_FACTOR - lse[:, None])
        # exp2 may overflow for blocks that the mask below excludes: their weights are replaced, never summed.
        weights = tl.where(valid[:, None], weights, 0.0)
        group_weights = tl.sum(tl.reshape(weights, [QUERIES_PER_TILE, HEADS_PER_TILE, BLOCKS_PER_TILE]), 1)
        is_selectable = block[None, :] < current_block[:, None]
        if spec.HAS_SEGMENTS:
            q_id = tl.load(q_segment_ids + tokens, mask=tokens < spec.T, other=-1)
            # Padding ids differ: -1 for queries, -2 for blocks.
            block_id = tl.load(block_segment_ids + block, mask=block < spec.M, other=-2)
            is_selectable = is_selectable & (q_id[:, None] == block_id[None, :])
        offset = tl.arange(0, QUERIES_PER_TILE)[:, None] * PADDED_NUM_BLOCKS + block[None, :]
        # -1 is below every sum of weights: such a block is never selected while another is left.
        tl.store(
            scratch + offset, tl.where(is_selectable, group_weights, -1.0), mask=(block < PADDED_NUM_BLOCKS)[None, :]
        )


@triton.jit
def _store_largest_blocks(
    current_blocks,
    scratch,
    indices,
    head,
    first_query,
    first_scratch_row,
    end_block,
    spec: tl.constexpr,
    BLOCKS_PER_TILE: tl.constexpr,
    PADDED_NUM_BLOCKS: tl.constexpr,
    QUERIES_PER_TOPK: tl.constexpr,
):
    """Stores the lists of QUERIES_PER_TOPK queries from `first_query` on, current block first; their scratch rows
    begin at `first_scratch_row`."""
    token = first_query + tl.arange(0, QUERIES_PER_TOPK)
    valid = token < spec.T
    current_block = tl.load(current_blocks + token, mask=valid, other=-1)
    at = indices + (tl.cast(token, tl.int64) * spec.HK + head) * spec.NUM_LISTED_BLOCKS
    tl.store(at, current_block, mask=valid)
    block = tl.arange(0, PADDED_NUM_BLOCKS)
    # Later columns hold weights of an earlier tile of queries, or are uninitialised; they count as -1.
    is_written = (block < (end_block + BLOCKS_PER_TILE - 1) // BLOCKS_PER_TILE * BLOCKS_PER_TILE)[None, :]
    rows = scratch + (first_scratch_row + tl.arange(0, QUERIES_PER_TOPK))[:, None] * PADDED_NUM_BLOCKS + block[None, :]
    weights = tl.load(rows, mask=is_written, other=-1.0)
    # Takes the largest for each slot: a few reductions over registers instead of a sort. Selected weights become -1.
    for slot in tl.range(1, spec.NUM_LISTED_BLOCKS):
        max_weight = tl.max(weights, 1)
        # If two blocks have equal weights, selects the later block, as the family's reference does.
        best_block = tl.max(tl.where(weights == max_weight[:, None], block[None, :], -1), 1)
        tl.store(at + slot, tl.where((max_weight >= 0.0) & (current_block >= 0), best_block, -1), mask=valid)
        weights = tl.where(block[None, :] == best_block[:, None], -1.0, weights)
