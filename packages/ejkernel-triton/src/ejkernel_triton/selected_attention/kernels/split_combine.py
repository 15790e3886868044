"""Adds up the gradients of keys and values of lists that were split over programs; see `selected_bwd_dkdv`."""

import triton
import triton.language as tl

from ejkernel_triton.selected_attention.kernels.selected_bwd_dkdv import _store_key_rows
from ejkernel_triton.selected_attention.kernels.tile import batch_row_address, load_block_start


@triton.jit
def split_combine_kernel(
    partial_dkey,
    partial_dvalue,
    sum_slots,
    block_starts,
    block_ends,
    dkey_of_unsplit_blocks,
    dvalue_of_unsplit_blocks,
    dkey,
    dvalue,
    spec: tl.constexpr,
    per: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    NUM_SUM_SLOTS: tl.constexpr,
):
    """Adds up the slots of one block whose list is split; `sum_slots` has its first slot and their number.

    `dkey` and `dvalue` alias `dkey_of_unsplit_blocks` and `dvalue_of_unsplit_blocks`; only such blocks are written.
    """
    TILES: tl.constexpr = (spec.BLOCK_SIZE + BLOCK_KV - 1) // BLOCK_KV
    program = tl.program_id(0)
    tile = program % TILES
    block = (program // TILES) % spec.M
    head = (program // (TILES * spec.M)) % spec.HK
    batch = program // (TILES * spec.M * spec.HK)
    sum_slots = batch_row_address(sum_slots, batch, per.SUM_SLOTS, spec.HK * spec.M * 2) + (head * spec.M + block) * 2
    first, count = tl.load(sum_slots), tl.load(sum_slots + 1)
    # Blocks with one split are complete in `dkey` and `dvalue` already.
    if count > 0:
        BD: tl.constexpr = spec.BD
        BV: tl.constexpr = spec.BV
        if spec.HAS_BLOCK_STARTS:
            block_starts = batch_row_address(block_starts, batch, per.BLOCK_STARTS, spec.M)
        start = load_block_start(block_starts, block, spec)
        index = tile * BLOCK_KV + tl.arange(0, BLOCK_KV)
        k_at = tl.arange(0, BLOCK_KV)[:, None] * BD + tl.arange(0, BD)[None, :]
        v_at = tl.arange(0, BLOCK_KV)[:, None] * BV + tl.arange(0, BV)[None, :]
        dk = tl.zeros([BLOCK_KV, BD], tl.float32)
        dv = tl.zeros([BLOCK_KV, BV], tl.float32)
        row = tl.cast(batch // per.PARTIAL_DKEY, tl.int64) * (spec.HK * NUM_SUM_SLOTS) + head * NUM_SUM_SLOTS + first
        # Slots are added in the order of the splits, so results are reproducible bit for bit.
        for slot in tl.range(0, count):
            q_row = (row + slot) * TILES + tile
            dk += tl.load(partial_dkey + q_row * (BLOCK_KV * BD) + k_at)
            dv += tl.load(partial_dvalue + q_row * (BLOCK_KV * BV) + v_at)
        end = tl.load(batch_row_address(block_ends, batch, per.BLOCK_ENDS, spec.M) + block)
        dkey += tl.cast(batch, tl.int64) * (spec.S * spec.HK * spec.D) + head * spec.D
        dvalue += tl.cast(batch, tl.int64) * (spec.S * spec.HK * spec.DV) + head * spec.DV
        _store_key_rows(dkey, start, index, end, dk, spec.D, BD, spec)
        _store_key_rows(dvalue, start, index, end, dv, spec.DV, BV, spec)
