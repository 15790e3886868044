"""Passes gradients of states through the transposed transitions of `chunk_transitions`, in reverse.

dS = D dS + products^T dS + readers^T dO
"""

import triton
import triton.language as tl

from ejkernel_triton.blocks import add_dot
from ejkernel_triton.linear_recurrence.kernels.tile import (
    chunk_address,
    load_sequence_bounds,
    load_state,
    load_token_rows,
    sequence_index_of_scan,
    store_state,
)
from ejkernel_triton.linear_recurrence.low_rank.kernels.chunk_transitions import chunk_block_pointers
from ejkernel_triton.linear_recurrence.low_rank.kernels.transition_scan import load_nearest_chunk_sums


@triton.jit
def transition_scan_bwd_kernel(
    log2_chunk_decay,
    state_readers,
    state_products,
    cotangent,
    final_state_gradients,
    padded_cu_seqlens,
    chunk_offsets,
    sequences_by_length,
    initial_state_gradients,
    dstates,
    spec: tl.constexpr,
    per: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    TILE_V: tl.constexpr,
):
    """Passes TILE_V columns of the gradient of one head's state from a sequence's last chunk to its first; see
    `backward.scan_state_gradients`.
    """
    CHUNK: tl.constexpr = spec.CHUNK_SIZE
    NUM_V_TILES: tl.constexpr = BLOCK_V // TILE_V
    program = tl.program_id(0)
    v_start = (program % NUM_V_TILES) * TILE_V
    program = program // NUM_V_TILES
    head = program % spec.H
    program = program // spec.H
    row = program // spec.NUM_SEQUENCES
    sequence = sequence_index_of_scan(sequences_by_length, row, program % spec.NUM_SEQUENCES, spec, per)
    first_chunk, end_chunk, sequence_start, sequence_end = load_sequence_bounds(
        padded_cu_seqlens, chunk_offsets, row, sequence, spec, per
    )
    final_row = tl.cast(row // per.FINAL_STATE_GRADIENTS, tl.int64) * spec.NUM_SEQUENCES + sequence
    final_base = final_state_gradients + (final_row * spec.H + head) * (spec.K * spec.V)
    acc = load_state(final_base, 0, v_start, BLOCK_K, TILE_V, spec).to(tl.float32)
    decay_entry = row // per.LOG2_CHUNK_DECAY
    next_log2_decay = load_nearest_chunk_sums(log2_chunk_decay, decay_entry, head, end_chunk - 1, BLOCK_K, spec)
    for step in tl.range(0, end_chunk - first_chunk):
        chunk = end_chunk - 1 - step
        log2_decay = next_log2_decay
        next_log2_decay = load_nearest_chunk_sums(log2_chunk_decay, decay_entry, head, chunk - 1, BLOCK_K, spec)
        # Before this chunk adds to it, `acc` is the gradient of the state after the chunk.
        at = chunk_block_pointers(dstates, row, head, chunk, v_start, BLOCK_K, BLOCK_V, TILE_V, spec)
        tl.store(at, acc.to(dstates.dtype.element_ty))
        readers = tl.load(
            chunk_block_pointers(state_readers, row // per.STATE_READERS, head, chunk, 0, CHUNK, BLOCK_K, BLOCK_K, spec)
        )
        products = tl.load(
            chunk_block_pointers(
                state_products, row // per.STATE_PRODUCTS, head, chunk, 0, BLOCK_K, BLOCK_K, BLOCK_K, spec
            )
        )
        first_token = sequence_start + (chunk - first_chunk) * CHUNK
        do_base = chunk_address(cotangent, row // per.COTANGENT, first_token, head, spec.T, spec.H, spec.V)
        do = load_token_rows(do_base, first_token, sequence_end, v_start, spec.H, spec.V, TILE_V, spec)
        gradient = acc.to(products.dtype)
        acc = add_dot(acc * tl.exp2(log2_decay)[:, None], tl.trans(products), gradient, spec)
        acc = add_dot(acc, tl.trans(readers), do, spec)
    initial_row = tl.cast(row, tl.int64) * spec.NUM_SEQUENCES + sequence
    store_state(initial_state_gradients + (initial_row * spec.H + head) * (spec.K * spec.V), acc, 0, v_start, spec)
