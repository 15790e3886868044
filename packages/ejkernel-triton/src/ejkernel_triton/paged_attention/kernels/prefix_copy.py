"""Copies the pages of a shared prefix in the query's dtype, so that tiles of an 8-bit cache are converted once.

    pages of 8 bits  --block table, tokens of the prefix-->  [pages of the table, PAGE_SIZE, HK, D or DV] of 16 bits

Each tile of query rows reads the whole prefix. A batch of 512 rows and 8 heads per KV head has 32 such tiles, each of
which would convert the prefix again, between the copy of a tile to shared memory and its product.
"""

import triton
import triton.language as tl

from ejkernel_triton.blocks import batch_row_address
from ejkernel_triton.paged_attention.kernels.tile import load_cache_rows, load_page_indices


@triton.jit
def convert_to_array_dtype(x, output):
    """Returns a tile in the dtype of an array."""
    # By way of float32, which represents all numbers of both: the interpreter reads integers as bits of bfloat16.
    return x.to(tl.float32).to(output.dtype.element_ty)


@triton.jit
def prefix_copy_kernel(
    keys,
    values,
    block_tables,
    prefix_lens,
    key_copy,
    value_copy,
    spec: tl.constexpr,
    per: tl.constexpr,
):
    """Copies one tile of one KV head's keys and values; tiles after the prefix are not written."""
    NUM_TILES: tl.constexpr = (spec.PAGES_PER_SEQUENCE * spec.PAGE_SIZE + spec.BLOCK_KV - 1) // spec.BLOCK_KV
    CAPACITY: tl.constexpr = spec.PAGES_PER_SEQUENCE * spec.PAGE_SIZE
    program = tl.program_id(0)
    # Neighbouring programs have the heads of the same tokens, which are next to each other in most layouts.
    head = program % spec.HK
    tile = program // spec.HK % NUM_TILES
    batch = tl.cast(program // (spec.HK * NUM_TILES), tl.int64)
    prefix_len = tl.load(batch_row_address(prefix_lens, batch, per.PREFIX_LENS, 1))
    if tile * spec.BLOCK_KV < prefix_len:
        keys = batch_row_address(keys, batch, per.KEYS, spec.KEY_CACHE_BATCH_STRIDE)
        values = batch_row_address(values, batch, per.VALUES, spec.VALUE_CACHE_BATCH_STRIDE)
        block_tables = batch_row_address(block_tables, batch, per.BLOCK_TABLES, spec.PAGES_PER_SEQUENCE)
        d = tl.arange(0, spec.BD)
        dv = tl.arange(0, spec.BV)
        k = tile * spec.BLOCK_KV + tl.arange(0, spec.BLOCK_KV)
        in_table = k < CAPACITY
        page, valid = load_page_indices(block_tables, 0, tile, k, (k < prefix_len) & in_table, spec)
        key_head_base = keys + tl.cast(head, tl.int64) * spec.KEY_STRIDES[2]
        value_head_base = values + tl.cast(head, tl.int64) * spec.VALUE_STRIDES[2] + spec.VALUE_OFFSET
        k_tile = load_cache_rows(key_head_base, page, tile, k, valid, d, d < spec.D, False, spec)
        v_tile = load_cache_rows(value_head_base, page, tile, k, valid, dv, dv < spec.DV, True, spec)
        row = (batch * CAPACITY + k) * spec.HK + head
        tl.store(
            key_copy + row[:, None] * spec.D + d[None, :],
            convert_to_array_dtype(k_tile, key_copy),
            mask=in_table[:, None] & (d < spec.D)[None, :],
        )
        tl.store(
            value_copy + row[:, None] * spec.DV + dv[None, :],
            convert_to_array_dtype(v_tile, value_copy),
            mask=in_table[:, None] & (dv < spec.DV)[None, :],
        )
