"""Adds up the gradients of keys and values of lists that were split over programs; see `selected_bwd_dkdv`."""

import triton
import triton.language as tl

from ejkernel_triton.selected_attention.kernels.selected_bwd_dkdv import _store_keys
from ejkernel_triton.selected_attention.kernels.tile import at_batch, block_start


@triton.jit
def split_combine_kernel(
    key_sums,
    value_sums,
    merges,
    starts,
    ends,
    dkey_so_far,
    dvalue_so_far,
    dkey,
    dvalue,
    spec: tl.constexpr,
    per: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    SUMS: tl.constexpr,
):
    """Adds up the slots of one block whose list is split; `merges` has its first slot and their number.

    `dkey` and `dvalue` alias `dkey_so_far` and `dvalue_so_far`; only such blocks are written.
    """
    TILES: tl.constexpr = (spec.SIZE + BLOCK_KV - 1) // BLOCK_KV
    program = tl.program_id(0)
    tile = program % TILES
    block = (program // TILES) % spec.M
    head = (program // (TILES * spec.M)) % spec.HK
    batch = program // (TILES * spec.M * spec.HK)
    merges = at_batch(merges, batch, per.MERGES, spec.HK * spec.M * 2) + (head * spec.M + block) * 2
    first, count = tl.load(merges), tl.load(merges + 1)
    # Blocks with one split are complete in `dkey` and `dvalue` already.
    if count > 0:
        BD: tl.constexpr = spec.BD
        BV: tl.constexpr = spec.BV
        if spec.STARTS:
            starts = at_batch(starts, batch, per.STARTS, spec.M)
        start = block_start(starts, block, spec)
        index = tile * BLOCK_KV + tl.arange(0, BLOCK_KV)
        k_at = tl.arange(0, BLOCK_KV)[:, None] * BD + tl.arange(0, BD)[None, :]
        v_at = tl.arange(0, BLOCK_KV)[:, None] * BV + tl.arange(0, BV)[None, :]
        dk = tl.zeros([BLOCK_KV, BD], tl.float32)
        dv = tl.zeros([BLOCK_KV, BV], tl.float32)
        row = tl.cast(batch // per.KEY_SUMS, tl.int64) * (spec.HK * SUMS) + head * SUMS + first
        # Slots are added in the order of the splits, so results are reproducible bit for bit.
        for slot in tl.range(0, count):
            q_row = (row + slot) * TILES + tile
            dk += tl.load(key_sums + q_row * (BLOCK_KV * BD) + k_at)
            dv += tl.load(value_sums + q_row * (BLOCK_KV * BV) + v_at)
        end = tl.load(at_batch(ends, batch, per.ENDS, spec.M) + block)
        dkey += tl.cast(batch, tl.int64) * (spec.S * spec.HK * spec.D) + head * spec.D
        dvalue += tl.cast(batch, tl.int64) * (spec.S * spec.HK * spec.DV) + head * spec.DV
        _store_keys(dkey, start, index, end, dk, spec.D, BD, spec)
        _store_keys(dvalue, start, index, end, dv, spec.DV, BV, spec)
