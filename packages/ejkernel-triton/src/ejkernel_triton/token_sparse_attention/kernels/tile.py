"""Device helpers of token-sparse attention: rows of query heads, and rows of the keys that a query lists.

A row of D columns is two tiles, the second of which is absent (`spec.BR` 0) unless both have fewer columns than a
single power of two: 512 + 64 of 576 in the latent form. Where it is absent, a constant stands in for the tile.
"""

import triton
import triton.language as tl

from ejkernel_triton.blocks import add_dot, batch_row_address, dot


@triton.jit
def find_query_program(program, HEADS: tl.constexpr, spec: tl.constexpr):
    """Returns (batch row in 64 bits, query, KV head, first query head, end of the KV head's query heads) of a program
    that has HEADS query heads of one query.
    """
    HEAD_TILES: tl.constexpr = (spec.G + HEADS - 1) // HEADS
    kv_head = (program // HEAD_TILES) % spec.HK
    token = (program // (HEAD_TILES * spec.HK)) % spec.T
    batch = tl.cast(program // (HEAD_TILES * spec.HK * spec.T), tl.int64)
    return batch, token, kv_head, kv_head * spec.G + (program % HEAD_TILES) * HEADS, (kv_head + 1) * spec.G


@triton.jit
def key_and_value_addresses(key, value, batch, kv_head, per: tl.constexpr, spec: tl.constexpr):
    """Returns the addresses of the keys and values of a KV head."""
    key = batch_row_address(key, batch, per.KEY, spec.S * spec.HK * spec.D) + kv_head * spec.D
    value = batch_row_address(value, batch, per.VALUE, spec.S * spec.VALUE_STRIDE)
    return key, value + kv_head * (spec.VALUE_STRIDE // spec.HK)


@triton.jit
def list_address(indices, batch, token, head, PER: tl.constexpr, spec: tl.constexpr):
    """Returns the address of the list of keys of a query and KV head."""
    list_index = token * spec.NUM_LISTS + (head if spec.NUM_LISTS > 1 else 0)
    row = batch_row_address(indices, batch, PER, spec.T * spec.NUM_LISTS * spec.K)
    return row + tl.cast(list_index, tl.int64) * spec.K


@triton.jit
def find_list_end(indices, BLOCK_KV: tl.constexpr, spec: tl.constexpr):
    """Returns the entries up to the last one with a key, rounded up to whole tiles."""
    CHUNK: tl.constexpr = 1024
    end = 0
    for first in tl.range(0, spec.K, CHUNK):
        entry = first + tl.arange(0, CHUNK)
        index = tl.load(indices + entry, mask=entry < spec.K, other=-1)
        end = tl.maximum(end, tl.max(tl.where(index >= 0, entry + 1, 0), 0))
    return (end + BLOCK_KV - 1) // BLOCK_KV * BLOCK_KV


@triton.jit
def load_indices(indices, first_entry, BLOCK_KV: tl.constexpr, spec: tl.constexpr):
    """Loads [BLOCK_KV] entries of a list; -1 after its end."""
    entry = first_entry + tl.arange(0, BLOCK_KV)
    if spec.K % BLOCK_KV == 0:
        return tl.load(indices + entry)
    else:
        return tl.load(indices + entry, mask=entry < spec.K, other=-1)


@triton.jit
def load_listed_rows(
    base, index, STRIDE: tl.constexpr, WIDTH: tl.constexpr, FIRST_COLUMN: tl.constexpr, COLUMNS: tl.constexpr
):
    """Loads [keys, COLUMNS] of the rows at `index` from FIRST_COLUMN on; 0 where the index is below 0, and from column
    WIDTH on.
    """
    columns = FIRST_COLUMN + tl.arange(0, COLUMNS)
    at = base + (tl.maximum(index, 0).to(tl.int64) * STRIDE)[:, None] + columns[None, :]
    # Keys that no query lists may hold NaN, and 0 x NaN would be NaN: empty entries are read as 0.
    if FIRST_COLUMN + COLUMNS > WIDTH:
        return tl.load(at, mask=(index >= 0)[:, None] & (columns < WIDTH)[None, :], other=0.0)
    else:
        return tl.load(at, mask=(index >= 0)[:, None], other=0.0)


@triton.jit
def load_key_tiles(key, index, spec: tl.constexpr):
    """Loads both tiles of the listed keys of a KV head."""
    first = load_listed_rows(key, index, spec.HK * spec.D, spec.D, 0, spec.BD)
    if spec.BR:
        return first, load_listed_rows(key, index, spec.HK * spec.D, spec.D, spec.BD, spec.BR)
    else:
        return first, 0.0


@triton.jit
def load_values(value, index, first_key_tile, spec: tl.constexpr):
    """Loads [keys, BV], the values of the listed keys; the first tile of the keys where that is their value."""
    if spec.VALUE_IS_FIRST_TILE:
        return first_key_tile
    else:
        return load_listed_rows(value, index, spec.VALUE_STRIDE, spec.DV, 0, spec.BV)


@triton.jit
def load_head_rows(
    base,
    token,
    first_head,
    end_head,
    WIDTH: tl.constexpr,
    FIRST_COLUMN: tl.constexpr,
    COLUMNS: tl.constexpr,
    HEADS: tl.constexpr,
    spec: tl.constexpr,
):
    """Loads [HEADS, COLUMNS] of an array [T, H, WIDTH]: query heads of one token; 0 from `end_head` and column WIDTH
    on.
    """
    heads = first_head + tl.arange(0, HEADS)
    columns = FIRST_COLUMN + tl.arange(0, COLUMNS)
    at = base + tl.cast(token, tl.int64) * (spec.H * WIDTH) + (heads[:, None] * WIDTH + columns[None, :])
    # Without padding there is no mask: a mask costs time even if it is always true.
    if spec.G % HEADS or FIRST_COLUMN + COLUMNS > WIDTH:
        return tl.load(at, mask=(heads < end_head)[:, None] & (columns < WIDTH)[None, :], other=0.0)
    else:
        return tl.load(at)


@triton.jit
def store_head_rows(
    base,
    token,
    first_head,
    end_head,
    tile,
    WIDTH: tl.constexpr,
    FIRST_COLUMN: tl.constexpr,
    COLUMNS: tl.constexpr,
    HEADS: tl.constexpr,
    spec: tl.constexpr,
):
    """Stores [HEADS, COLUMNS] to the addresses that `load_head_rows` reads."""
    heads = first_head + tl.arange(0, HEADS)
    columns = FIRST_COLUMN + tl.arange(0, COLUMNS)
    at = base + tl.cast(token, tl.int64) * (spec.H * WIDTH) + (heads[:, None] * WIDTH + columns[None, :])
    tl.store(at, tile.to(base.dtype.element_ty), mask=(heads < end_head)[:, None] & (columns < WIDTH)[None, :])


@triton.jit
def load_query_tiles(query, token, first_head, end_head, HEADS: tl.constexpr, spec: tl.constexpr):
    """Loads both tiles of query heads of one token."""
    first = load_head_rows(query, token, first_head, end_head, spec.D, 0, spec.BD, HEADS, spec)
    if spec.BR:
        return first, load_head_rows(query, token, first_head, end_head, spec.D, spec.BD, spec.BR, HEADS, spec)
    else:
        return first, 0.0


@triton.jit
def load_head_scalars(base, token, first_head, end_head, HEADS: tl.constexpr, spec: tl.constexpr):
    """Loads [HEADS] of an array [T, H]; 0 from `end_head` on."""
    heads = first_head + tl.arange(0, HEADS)
    return tl.load(base + tl.cast(token, tl.int64) * spec.H + heads, mask=heads < end_head, other=0.0)


@triton.jit
def dot_rows(a, a_second_tile, b, b_second_tile, spec: tl.constexpr):
    """Returns a b^T of rows of two tiles each, in float32."""
    product = dot(a, tl.trans(b), spec)
    if spec.BR:
        product = add_dot(product, a_second_tile, tl.trans(b_second_tile), spec)
    return product
