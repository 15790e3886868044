# pyright: basic, reportIndexIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalMemberAccess=false, reportGeneralTypeIssues=false
"""The selection kernel: weights of blocks, summed over the heads of a KV head, and the largest of each query.

    q [ROWS, BD]      per tile of blocks:  s = q K_c^T --> p = exp2(s - lse) --> sum over heads --> scratch [queries, M]
    (queries x heads)                                                            (a program's own, overwritten by its
                                                                                  next tile of queries: it stays in L2)
    then, a few queries at a time:  scratch [few, M] --> N - 1 times: the largest, the later of equals; taken out

The log-sum-exp is that of the compressed branch, which ran before. No array of queries by blocks is in memory: a
program has one scratch row for each query of a tile, and there are as many programs as run at once.
"""

import triton
import triton.language as tl

from ejkernel_triton.blocks import dot
from ejkernel_triton.selected_attention.selected_tile import at_batch


@triton.jit
def select_kernel(
    query,
    keys,
    shift,
    own_blocks,
    q_ids,
    block_ids,
    indices,
    scratch,
    spec: tl.constexpr,
    per: tl.constexpr,
    PROGRAMS: tl.constexpr,
    QUERIES: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BM: tl.constexpr,
    FEW: tl.constexpr,
):
    """PROGRAMS of a batch row share its tiles of QUERIES queries of every KV head.

    HEADS is the group size padded to a power of two, BLOCKS the blocks of a tile of scores, BM all blocks padded to a
    power of two that is no less, FEW the queries whose largest weights are looked for at once.
    """
    program = tl.program_id(0) % PROGRAMS
    batch = tl.program_id(0) // PROGRAMS
    query = at_batch(query, batch, per.QUERY, spec.T * spec.H * spec.D)
    keys = at_batch(keys, batch, per.KEYS, spec.M * spec.HK * spec.D)
    shift = at_batch(shift, batch, per.SHIFT, spec.T * spec.H)
    own_blocks = at_batch(own_blocks, batch, per.OWN_BLOCKS, spec.T)
    if spec.SEGMENTS:
        q_ids = at_batch(q_ids, batch, per.Q_IDS, spec.T)
        block_ids = at_batch(block_ids, batch, per.BLOCK_IDS, spec.M)
    indices += tl.cast(batch, tl.int64) * (spec.T * spec.HK * spec.SLOTS)
    scratch += tl.cast(tl.program_id(0), tl.int64) * (QUERIES * BM)
    TILES: tl.constexpr = (spec.T + QUERIES - 1) // QUERIES
    for item in tl.range(program, TILES * spec.HK, PROGRAMS):
        head = item // TILES
        start = (item % TILES) * QUERIES
        token = start + tl.arange(0, QUERIES)
        own = tl.load(own_blocks + token, mask=token < spec.T, other=-1)
        last = tl.max(own, 0)
        ids = (q_ids, block_ids)
        _weigh(query, keys, shift, ids, scratch, head, start, own, last, spec, QUERIES, HEADS, BLOCKS, BM)
        # The scratch rows are read by other threads than those that wrote them, and then overwritten.
        tl.debug_barrier()
        for first in tl.range(0, QUERIES, FEW):
            _take_largest(own_blocks, scratch, indices, head, start + first, first, last, spec, BLOCKS, BM, FEW)
        tl.debug_barrier()


@triton.jit
def _weigh(
    query,
    keys,
    shift,
    ids,
    scratch,
    head,
    start,
    own,
    last,
    spec: tl.constexpr,
    QUERIES: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BM: tl.constexpr,
):
    """Writes the summed weights of the blocks before each query's own to its scratch row, and -1 for the others."""
    q_ids, block_ids = ids
    ROWS: tl.constexpr = QUERIES * HEADS
    d = tl.arange(0, spec.BD)
    row = tl.arange(0, ROWS)
    token, member = start + row // HEADS, row % HEADS
    there = (token < spec.T) & (member < spec.G)
    number = tl.cast(token * spec.H + head * spec.G + member, tl.int64)
    in_row = (d < spec.D)[None, :]
    q = tl.load(query + number[:, None] * spec.D + d[None, :], mask=there[:, None] & in_row, other=0.0)
    lse = tl.load(shift + number, mask=there, other=0.0)
    tokens = start + tl.arange(0, QUERIES)
    for tile in tl.range(0, (last + BLOCKS - 1) // BLOCKS):
        block = tile * BLOCKS + tl.arange(0, BLOCKS)
        at = keys + (block * spec.HK + head)[:, None] * spec.D + d[None, :]
        k = tl.load(at, mask=(block < spec.M)[:, None] & in_row, other=0.0)
        weights = tl.exp2(dot(q, tl.trans(k), spec) * spec.FACTOR - lse[:, None])
        # Blocks that are hidden from the query may have any score.
        weights = tl.where(there[:, None], weights, 0.0)
        summed = tl.sum(tl.reshape(weights, [QUERIES, HEADS, BLOCKS]), 1)
        before = block[None, :] < own[:, None]
        if spec.SEGMENTS:
            q_id = tl.load(q_ids + tokens, mask=tokens < spec.T, other=-1)
            block_id = tl.load(block_ids + block, mask=block < spec.M, other=-2)
            before = before & (q_id[:, None] == block_id[None, :])
        place = tl.arange(0, QUERIES)[:, None] * BM + block[None, :]
        tl.store(scratch + place, tl.where(before, summed, -1.0), mask=(block < BM)[None, :])


@triton.jit
def _take_largest(
    own_blocks,
    scratch,
    indices,
    head,
    start,
    first,
    last,
    spec: tl.constexpr,
    BLOCKS: tl.constexpr,
    BM: tl.constexpr,
    FEW: tl.constexpr,
):
    """Writes the lists of FEW queries from `start` on, whose scratch rows begin at `first`: their own block first."""
    token = start + tl.arange(0, FEW)
    there = token < spec.T
    own = tl.load(own_blocks + token, mask=there, other=-1)
    at = indices + (tl.cast(token, tl.int64) * spec.HK + head) * spec.SLOTS
    tl.store(at, own, mask=there)
    block = tl.arange(0, BM)
    written = (block < (last + BLOCKS - 1) // BLOCKS * BLOCKS)[None, :]
    rows = scratch + (first + tl.arange(0, FEW))[:, None] * BM + block[None, :]
    weights = tl.load(rows, mask=written, other=-1.0)
    for slot in tl.range(1, spec.SLOTS):
        largest = tl.max(weights, 1)
        found = tl.max(tl.where(weights == largest[:, None], block[None, :], -1), 1)
        tl.store(at + slot, tl.where((largest >= 0.0) & (own >= 0), found, -1), mask=there)
        weights = tl.where(block[None, :] == found[:, None], -1.0, weights)
