"""Passes states through the transitions of `chunk_transitions`, and computes the outputs of each chunk.

A program holds all key channels and a tile of value channels of one head's state in registers; value channels are
independent of each other:

    output = readers S + intra-chunk output
    S      = D S + products S + writes
"""

import triton
import triton.language as tl

from ejkernel_triton.blocks import add_dot
from ejkernel_triton.linear_recurrence.kernels.tile import (
    chunk_address,
    load_sequence_bounds,
    load_state,
    sequence_index_of_scan,
    store_state,
    store_token_rows,
)
from ejkernel_triton.linear_recurrence.low_rank.kernels.chunk_transitions import chunk_block_pointers


@triton.jit
def load_nearest_chunk_sums(chunk_sums, entry, head, chunk, BLOCK_K: tl.constexpr, spec: tl.constexpr):
    """Returns [BLOCK_K] of a chunk of [rows, H, NUM_CHUNKS, BLOCK_K], or of the nearest chunk if it is out of
    bounds.
    """
    chunk = tl.maximum(0, tl.minimum(chunk, spec.NUM_CHUNKS - 1))
    at = ((tl.cast(entry, tl.int64) * spec.H + head) * spec.NUM_CHUNKS + chunk) * BLOCK_K
    return tl.load(chunk_sums + at + tl.arange(0, BLOCK_K))


@triton.jit
def transition_scan_kernel(
    log2_chunk_decay,
    state_readers,
    intra_chunk_outputs,
    state_products,
    state_writes,
    initial_states,
    padded_cu_seqlens,
    chunk_offsets,
    sequences_by_length,
    output,
    final_states,
    states,
    spec: tl.constexpr,
    per: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    TILE_V: tl.constexpr,
    HAS_INITIAL_STATES: tl.constexpr,
    STORE_CHUNK_STATES: tl.constexpr,
):
    """Passes TILE_V columns of one head's state along a sequence; see `forward.scan_transitions`."""
    CHUNK: tl.constexpr = spec.CHUNK_SIZE
    NUM_V_TILES: tl.constexpr = BLOCK_V // TILE_V
    program = tl.program_id(0)
    # Tiles of values are the fastest index: programs that run together read the same transitions from L2.
    v_start = (program % NUM_V_TILES) * TILE_V
    program = program // NUM_V_TILES
    head = program % spec.H
    program = program // spec.H
    row = program // spec.NUM_SEQUENCES
    sequence = sequence_index_of_scan(sequences_by_length, row, program % spec.NUM_SEQUENCES, spec, per)
    first_chunk, end_chunk, sequence_start, sequence_end = load_sequence_bounds(
        padded_cu_seqlens, chunk_offsets, row, sequence, spec, per
    )
    acc = tl.zeros([BLOCK_K, TILE_V], tl.float32)
    if HAS_INITIAL_STATES:
        state_row = tl.cast(row // per.INITIAL_STATES, tl.int64) * spec.NUM_SEQUENCES + sequence
        initial_base = initial_states + (state_row * spec.H + head) * (spec.K * spec.V)
        acc = load_state(initial_base, 0, v_start, BLOCK_K, TILE_V, spec).to(tl.float32)
    decay_entry = row // per.LOG2_CHUNK_DECAY
    next_log2_decay = load_nearest_chunk_sums(log2_chunk_decay, decay_entry, head, first_chunk, BLOCK_K, spec)
    for step in tl.range(0, end_chunk - first_chunk):
        chunk = first_chunk + step
        # Loaded one chunk ahead: the pipeliner copies operands of products only.
        log2_decay = next_log2_decay
        next_log2_decay = load_nearest_chunk_sums(log2_chunk_decay, decay_entry, head, chunk + 1, BLOCK_K, spec)
        if STORE_CHUNK_STATES:
            at = chunk_block_pointers(states, row, head, chunk, v_start, BLOCK_K, BLOCK_V, TILE_V, spec)
            tl.store(at, acc.to(states.dtype.element_ty))
        readers = tl.load(
            chunk_block_pointers(state_readers, row // per.STATE_READERS, head, chunk, 0, CHUNK, BLOCK_K, BLOCK_K, spec)
        )
        intra_chunk_tile = tl.load(
            chunk_block_pointers(
                intra_chunk_outputs, row // per.INTRA_CHUNK_OUTPUTS, head, chunk, v_start, CHUNK, BLOCK_V, TILE_V, spec
            )
        )
        products = tl.load(
            chunk_block_pointers(
                state_products, row // per.STATE_PRODUCTS, head, chunk, 0, BLOCK_K, BLOCK_K, BLOCK_K, spec
            )
        )
        writes = tl.load(
            chunk_block_pointers(
                state_writes, row // per.STATE_WRITES, head, chunk, v_start, BLOCK_K, BLOCK_V, TILE_V, spec
            )
        )
        state = acc.to(readers.dtype)
        acc = add_dot(acc * tl.exp2(log2_decay)[:, None] + writes.to(tl.float32), products, state, spec)
        first_token = sequence_start + step * CHUNK
        output_address = chunk_address(output, row, first_token, head, spec.T, spec.H, spec.V)
        output_tile = add_dot(intra_chunk_tile.to(tl.float32), readers, state, spec)
        store_token_rows(output_address, output_tile, first_token, sequence_end, v_start, spec.H, spec.V, spec)
    final_row = tl.cast(row, tl.int64) * spec.NUM_SEQUENCES + sequence
    store_state(final_states + (final_row * spec.H + head) * (spec.K * spec.V), acc, 0, v_start, spec)
