# pyright: basic, reportIndexIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalMemberAccess=false, reportGeneralTypeIssues=false
"""Tiles of selected attention: the heads of one query, the keys of a listed block, and what of them attends.

Arrays of a batch row are found by `at_batch`; `per` says how many rows share one.
"""

import triton
import triton.language as tl


@triton.jit
def at_batch(array, batch, PER: tl.constexpr, ELEMENTS: tl.constexpr):
    """Where a batch row's part of an array begins; PER rows share one. 64 bits: arrays may be large."""
    return array + tl.cast(batch // PER, tl.int64) * ELEMENTS


@triton.jit
def load_heads(base, token, head, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, spec: tl.constexpr):
    """[BG, COLUMNS]: the rows of one token, of all query heads of a KV head; 0 in heads and columns that pad."""
    g = tl.arange(0, spec.BG)
    d = tl.arange(0, COLUMNS)
    at = base + tl.cast(token * spec.H + head * spec.G, tl.int64) * WIDTH + (g[:, None] * WIDTH + d[None, :])
    if spec.BG != spec.G or COLUMNS != WIDTH:
        return tl.load(at, mask=(g < spec.G)[:, None] & (d < WIDTH)[None, :], other=0.0)
    else:
        return tl.load(at)


@triton.jit
def store_heads(base, token, head, tile, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, spec: tl.constexpr):
    """Writes [BG, COLUMNS] to where `load_heads` reads."""
    g = tl.arange(0, spec.BG)
    d = tl.arange(0, COLUMNS)
    at = base + tl.cast(token * spec.H + head * spec.G, tl.int64) * WIDTH + (g[:, None] * WIDTH + d[None, :])
    tl.store(at, tile.to(base.dtype.element_ty), mask=(g < spec.G)[:, None] & (d < WIDTH)[None, :])


@triton.jit
def load_numbers(base, token, head, spec: tl.constexpr):
    """[BG] of an array [T, H]: one number for every query head of a KV head."""
    g = tl.arange(0, spec.BG)
    return tl.load(base + tl.cast(token * spec.H + head * spec.G, tl.int64) + g, mask=g < spec.G, other=0.0)


@triton.jit
def slots_in_use(listed, spec: tl.constexpr):
    """One more than the last slot of a query's list that names a block."""
    slots = tl.arange(0, spec.BS)
    blocks = tl.load(listed + slots, mask=slots < spec.SLOTS, other=-1)
    return tl.max(tl.where(blocks >= 0, slots + 1, 0), 0)


@triton.jit
def block_start(starts, block, spec: tl.constexpr):
    """The first key of a block; that of the first block for -1."""
    block = tl.maximum(block, 0)
    if spec.STARTS:
        return tl.load(starts + block)
    else:
        return block * spec.SIZE


@triton.jit
def load_keys(base, start, index, there, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, spec: tl.constexpr):
    """[keys, COLUMNS] at keys `start + index` of an array [S, HK, WIDTH]; 0 where they are not there."""
    d = tl.arange(0, COLUMNS)
    # 64 bits for where the tile begins, 32 for where an element is in it: 64-bit offsets of elements take registers.
    at = base + tl.cast(start, tl.int64) * (spec.HK * WIDTH) + (index[:, None] * (spec.HK * WIDTH) + d[None, :])
    if COLUMNS != WIDTH:
        return tl.load(at, mask=there[:, None] & (d < WIDTH)[None, :], other=0.0)
    else:
        return tl.load(at, mask=there[:, None], other=0.0)


@triton.jit
def own_key(own, token, spec: tl.constexpr):
    """The index of a query's own key."""
    if spec.OWN:
        return tl.load(own + token)
    else:
        return token


@triton.jit
def attending(k_ids, key, there, own, q_id, spec: tl.constexpr):
    """Which keys of a block one query attends to."""
    keep = there & (key <= own)
    if spec.SEGMENTS:
        keep = keep & (tl.load(k_ids + key, mask=there, other=-1) == q_id)
    return keep
