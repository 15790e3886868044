"""Computes what each entry of a list adds to the gradients of its key and value, summed over the heads of a KV head.

    dk of an entry = scale sum_h p_ihn (<do_ih, v_j> - delta_ih) q_ih        dv of an entry = sum_h p_ihn do_ih

`sum_listed_rows` adds the entries of each key, in the order of the queries: there are no atomics, and two runs give the
same bits.
"""

import triton
import triton.language as tl

from ejkernel_triton.blocks import add_dot, batch_row_address, dot
from ejkernel_triton.token_sparse_attention.kernels.tile import (
    dot_rows,
    key_and_value_addresses,
    list_address,
    load_head_rows,
    load_head_scalars,
    load_indices,
    load_key_tiles,
    load_query_tiles,
    load_values,
)


@triton.jit
def sparse_bwd_dkdv_kernel(
    query,
    key,
    value,
    indices,
    cotangent,
    log2_lse,
    delta,
    entry_dkey,
    entry_dvalue,
    spec: tl.constexpr,
    per: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_KV: tl.constexpr,
):
    """Computes the gradients of BLOCK_KV entries of one list, [T, K, HK, D] and [T, K, HK, DV].

    Where a value is the first tile of its key, its gradient is added to the key's, and `entry_dvalue` is not written.
    """
    ENTRY_TILES: tl.constexpr = (spec.K + BLOCK_KV - 1) // BLOCK_KV
    HEAD_TILES: tl.constexpr = (spec.G + HEADS - 1) // HEADS
    program = tl.program_id(0)
    first_entry = (program % ENTRY_TILES) * BLOCK_KV
    kv_head = (program // ENTRY_TILES) % spec.HK
    token = (program // (ENTRY_TILES * spec.HK)) % spec.T
    batch = tl.cast(program // (ENTRY_TILES * spec.HK * spec.T), tl.int64)
    indices = list_address(indices, batch, token, kv_head, per.INDICES, spec)
    index = load_indices(indices, first_entry, BLOCK_KV, spec)
    # Nothing reads what an empty entry adds.
    if tl.max(index, 0) >= 0:
        query = batch_row_address(query, batch, per.QUERY, spec.T * spec.H * spec.D)
        key, value = key_and_value_addresses(key, value, batch, kv_head, per, spec)
        cotangent = batch_row_address(cotangent, batch, per.COTANGENT, spec.T * spec.H * spec.DV)
        log2_lse = batch_row_address(log2_lse, batch, per.LOG2_LSE, spec.T * spec.H)
        delta = batch_row_address(delta, batch, per.DELTA, spec.T * spec.H)
        k, k_rest = load_key_tiles(key, index, spec)
        v = load_values(value, index, k, spec)
        BD: tl.constexpr = spec.BD
        BR: tl.constexpr = spec.BR
        BV: tl.constexpr = spec.BV
        dk = tl.zeros([BLOCK_KV, BD], tl.float32)
        dk_rest = 0.0
        if spec.BR:
            dk_rest = tl.zeros([BLOCK_KV, BR], tl.float32)
        dv = 0.0
        if not spec.VALUE_IS_FIRST_TILE:
            dv = tl.zeros([BLOCK_KV, BV], tl.float32)
        end_head = (kv_head + 1) * spec.G
        for tile in tl.range(0, HEAD_TILES):
            first_head = kv_head * spec.G + tile * HEADS
            q, q_rest = load_query_tiles(query, token, first_head, end_head, HEADS, spec)
            do = load_head_rows(cotangent, token, first_head, end_head, spec.DV, 0, spec.BV, HEADS, spec)
            log2_lse_rows = load_head_scalars(log2_lse, token, first_head, end_head, HEADS, spec)
            delta_rows = load_head_scalars(delta, token, first_head, end_head, HEADS, spec)
            scores = dot_rows(k, k_rest, q, q_rest, spec) * spec.LOG2_SCORE_FACTOR
            # Rows of padding heads are 0 in q and do, so their weights of exp2(0) add nothing.
            weights = tl.where((index >= 0)[:, None], tl.exp2(scores - log2_lse_rows[None, :]), 0.0)
            dscores = weights * (dot(v, tl.trans(do), spec) - delta_rows[None, :]) * spec.DSCORE_FACTOR
            dscores = dscores.to(q.dtype)
            dk = add_dot(dk, dscores, q, spec)
            if spec.BR:
                dk_rest = add_dot(dk_rest, dscores, q_rest, spec)
            if spec.VALUE_IS_FIRST_TILE:
                # The sum of both is multiplied by SUM_FACTOR below.
                dk = add_dot(dk, (weights * (1.0 / spec.SUM_FACTOR)).to(do.dtype), do, spec)
            else:
                dv = add_dot(dv, weights.to(do.dtype), do, spec)
        row = (batch * spec.T + token) * spec.K + first_entry
        _store_entries(entry_dkey, row, first_entry, kv_head, dk * spec.SUM_FACTOR, spec.D, 0, spec.BD, BLOCK_KV, spec)
        if spec.BR:
            dk_rest *= spec.SUM_FACTOR
            _store_entries(entry_dkey, row, first_entry, kv_head, dk_rest, spec.D, spec.BD, spec.BR, BLOCK_KV, spec)
        if not spec.VALUE_IS_FIRST_TILE:
            _store_entries(entry_dvalue, row, first_entry, kv_head, dv, spec.DV, 0, spec.BV, BLOCK_KV, spec)


@triton.jit
def _store_entries(
    base,
    row,
    first_entry,
    kv_head,
    tile,
    WIDTH: tl.constexpr,
    FIRST_COLUMN: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    spec: tl.constexpr,
):
    """Stores [BLOCK_KV, COLUMNS] of an array [.., K, HK, WIDTH] from entry `row` on."""
    entries = tl.arange(0, BLOCK_KV)
    columns = FIRST_COLUMN + tl.arange(0, COLUMNS)
    at = base + row * (spec.HK * WIDTH) + kv_head * WIDTH + (entries[:, None] * (spec.HK * WIDTH) + columns[None, :])
    valid = (first_entry + entries < spec.K)[:, None] & (columns < WIDTH)[None, :]
    tl.store(at, tile.to(base.dtype.element_ty), mask=valid)
