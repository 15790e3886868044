"""Device helpers of selected attention: the heads of one query, the keys of a listed block, and the mask between them.

`batch_row_address` returns the address of a batch row; `per` has the number of batch rows that share an entry.
"""

import triton
import triton.language as tl


@triton.jit
def batch_row_address(array, batch, PER: tl.constexpr, ELEMENTS_PER_ENTRY: tl.constexpr):
    """Returns the address of a batch row in an array in which PER rows share one entry, in 64 bits: arrays may be
    large.
    """
    return array + tl.cast(batch // PER, tl.int64) * ELEMENTS_PER_ENTRY


@triton.jit
def load_head_rows(base, token, head, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, spec: tl.constexpr):
    """Loads [BG, COLUMNS]: the rows of one token, of all query heads of a KV head; 0 in padding heads and columns."""
    g = tl.arange(0, spec.BG)
    d = tl.arange(0, COLUMNS)
    at = base + tl.cast(token * spec.H + head * spec.G, tl.int64) * WIDTH + (g[:, None] * WIDTH + d[None, :])
    # Without padding there is no mask: a mask costs time even if it is always true.
    if spec.BG != spec.G or COLUMNS != WIDTH:
        return tl.load(at, mask=(g < spec.G)[:, None] & (d < WIDTH)[None, :], other=0.0)
    else:
        return tl.load(at)


@triton.jit
def store_head_rows(base, token, head, tile, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, spec: tl.constexpr):
    """Stores [BG, COLUMNS] to the addresses that `load_head_rows` reads."""
    g = tl.arange(0, spec.BG)
    d = tl.arange(0, COLUMNS)
    at = base + tl.cast(token * spec.H + head * spec.G, tl.int64) * WIDTH + (g[:, None] * WIDTH + d[None, :])
    tl.store(at, tile.to(base.dtype.element_ty), mask=(g < spec.G)[:, None] & (d < WIDTH)[None, :])


@triton.jit
def load_head_scalars(base, token, head, spec: tl.constexpr):
    """Loads [BG] of an array [T, H]: one element per query head of a KV head."""
    g = tl.arange(0, spec.BG)
    return tl.load(base + tl.cast(token * spec.H + head * spec.G, tl.int64) + g, mask=g < spec.G, other=0.0)


@triton.jit
def find_block_list_end(block_list, spec: tl.constexpr):
    """Returns the index after the last used slot of a query's list."""
    slots = tl.arange(0, spec.BS)
    # One load for the list; empty slots may be between others.
    blocks = tl.load(block_list + slots, mask=slots < spec.NUM_LISTED_BLOCKS, other=-1)
    return tl.max(tl.where(blocks >= 0, slots + 1, 0), 0)


@triton.jit
def load_block_start(block_starts, block, spec: tl.constexpr):
    """Returns the first key of a block; that of the first block for -1."""
    # An empty slot is -1: the load of `block_starts` has no mask and must not start before the array.
    block = tl.maximum(block, 0)
    if spec.HAS_BLOCK_STARTS:
        return tl.load(block_starts + block)
    else:
        return block * spec.BLOCK_SIZE


@triton.jit
def load_keys(base, start, index, valid, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, spec: tl.constexpr):
    """Returns [keys, COLUMNS] at keys `start + index` of an array [S, HK, WIDTH]; 0 where `valid` is false."""
    d = tl.arange(0, COLUMNS)
    # The tile's address has 64 bits, offsets within it 32: 64-bit offsets of elements take registers.
    at = base + tl.cast(start, tl.int64) * (spec.HK * WIDTH) + (index[:, None] * (spec.HK * WIDTH) + d[None, :])
    if COLUMNS != WIDTH:
        return tl.load(at, mask=valid[:, None] & (d < WIDTH)[None, :], other=0.0)
    else:
        return tl.load(at, mask=valid[:, None], other=0.0)


@triton.jit
def load_query_position(q_positions, token, spec: tl.constexpr):
    """Returns the query's position among the keys, which is the last key it may attend to."""
    if spec.HAS_POSITIONS:
        return tl.load(q_positions + token)
    else:
        return token


@triton.jit
def mask_attending_keys(k_segment_ids, key, valid, q_position, q_segment_id, spec: tl.constexpr):
    """Returns which `key` of a block a query attends to: those that are `valid`, not after its `q_position`, and of its
    segment.
    """
    attends = valid & (key <= q_position)
    if spec.HAS_SEGMENTS:
        attends = attends & (tl.load(k_segment_ids + key, mask=valid, other=-1) == q_segment_id)
    return attends
