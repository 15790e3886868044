"""How many chunks a state spans: the number of chunks after which everything earlier has decayed to nothing.

    segment    |  chunk 0  |  chunk 1  | ... |  chunk n - 2  |  chunk n - 1  |
    at its end    2 ** -900   2 ** -890         2 ** -140        2 ** -70
                  these underflow: below 2 ** -126          effective length 1 chunk

The final state of a segment then depends on its last chunks only, and its transition is 0. Without the delta rule the
gates alone determine this. With it, a token's write depends on the state, so the chunks' transitions are multiplied,
from the segment's end on until nothing is left of the identity.
"""

import triton
import triton.language as tl

from ejkernel_triton.blocks import add_dot, dot
from ejkernel_triton.linear_recurrence.kernels.tile import (
    chunk_address,
    gates_address,
    load_head_gate_cumsum,
    load_head_gate_sum,
    load_log2_chunk_decay,
    load_token_rows,
)

LOG2_MIN_NORMAL = tl.constexpr(-126.0)
"""log2 of the smallest normal float32: states below it count as zero."""

MIN_NORMAL = tl.constexpr(2.0**-126)

CHUNKS_IF_NEVER_DECAYED = tl.constexpr(1 << 30)
"""A count of more chunks than there are: the state does not vanish."""

SAFETY_MARGIN_CHUNKS = tl.constexpr(16)
"""Chunks of tolerance in the check that a state loses at least a bit per chunk: 12 for the identity of 64 columns."""

GATES_PER_STEP = tl.constexpr(32)


@triton.jit
def constant_gate_chunks_until_decayed(constant_log2_gate, spec: tl.constexpr):
    """Returns the chunks over which a constant gate leaves a nonzero state."""
    # Without decay, the length is over 1.2e9 tokens.
    return (1.0 / tl.minimum(constant_log2_gate, -1e-7) * LOG2_MIN_NORMAL).to(tl.int32) // spec.CHUNK_SIZE + 1


@triton.jit
def max_chunks_until_decayed(
    gates,
    constant_log2_gate,
    row,
    head,
    k_start,
    first_chunk,
    end_chunk,
    BLOCK_K: tl.constexpr,
    REVERSE: tl.constexpr,
    spec: tl.constexpr,
    per: tl.constexpr,
):
    """Returns an upper bound on the chunks before `end_chunk`, in reverse from `first_chunk` on, over which a nonzero
    state is left.
    """
    C: tl.constexpr = spec.CHUNK_SIZE
    if spec.HAS_CONSTANT_GATES:
        # One more than `decayed_initial_states_kernel` reads.
        return constant_gate_chunks_until_decayed(constant_log2_gate, spec) + 1
    else:
        base = gates_address(gates, row, head, 0, spec, per)
        channels = k_start + tl.arange(0, BLOCK_K)
        log2_decay = tl.zeros([BLOCK_K], tl.float32)
        if spec.GATE_CHANNELS > 1:
            log2_decay = tl.where(channels < spec.K, 0.0, LOG2_MIN_NORMAL)  # channels of the padding do not count
        max_log2_decay = tl.max(tl.zeros([BLOCK_K], tl.float32), 0)
        num_chunks = first_chunk * 0
        for first_distance in tl.range(0, end_chunk - first_chunk, GATES_PER_STEP, num_stages=1):
            if max_log2_decay > LOG2_MIN_NORMAL:
                distance = first_distance + tl.arange(0, GATES_PER_STEP)
                valid = distance < end_chunk - first_chunk
                # The last row of a chunk has the sum of its gates.
                at = (
                    (first_chunk + distance if REVERSE else end_chunk - 1 - distance) * C + (C - 1)
                ) * spec.GATE_CHANNELS
                if spec.GATE_CHANNELS == 1:
                    log2_decay += tl.sum(tl.load(base + at, mask=valid, other=0.0), 0)
                else:
                    in_bounds = valid[:, None] & (channels < spec.K)[None, :]
                    log2_decay += tl.sum(
                        tl.load(base + (at[:, None] + channels[None, :]), mask=in_bounds, other=0.0), 0
                    )
                # The channel that decays the least counts.
                max_log2_decay = tl.max(log2_decay, 0)
                num_chunks += GATES_PER_STEP
        return tl.where(max_log2_decay > LOG2_MIN_NORMAL, CHUNKS_IF_NEVER_DECAYED, num_chunks)


@triton.jit
def load_chunks_until_decayed(
    chunks_until_decayed, row, segment, head, NUM_SEGMENTS: tl.constexpr, NUM_TILES: tl.constexpr, spec: tl.constexpr
):
    """Returns the chunks until the state of a segment and head has decayed: the maximum over the tiles of columns of
    [rows, NUM_SEGMENTS, H, NUM_TILES].
    """
    base = chunks_until_decayed + ((row * NUM_SEGMENTS + segment) * spec.H + head) * NUM_TILES
    max_over_tiles = tl.load(base)
    for tile in tl.static_range(1, NUM_TILES):
        max_over_tiles = tl.maximum(max_over_tiles, tl.load(base + tile))
    return max_over_tiles


@triton.jit
def chunks_until_decayed_kernel(
    key,
    gates,
    w,
    chunks_until_decayed,
    spec: tl.constexpr,
    per: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    REVERSE: tl.constexpr,
    FIRST_SCANNED_SEGMENT: tl.constexpr,
    NUM_SCANNED_SEGMENTS: tl.constexpr,
    MAX_SCANNED_CHUNKS: tl.constexpr,
    CHUNKS_PER_DECAY_CHECK: tl.constexpr,
):
    """Computes the chunks until a segment's state has decayed, with the delta rule; see
    `forward.find_chunks_until_decayed`.

    That is how many of its last chunks the state at its end depends on; in reverse, how many of its first chunks the
    gradient depends on. A program computes BLOCK_V columns of the product of transitions M, starting with the identity:
    of M^T from the last chunk on, in reverse of M from the first on. It checks every CHUNKS_PER_DECAY_CHECK chunks, and
    gives up after MAX_SCANNED_CHUNKS.
    """
    C: tl.constexpr = spec.CHUNK_SIZE
    NUM_TILES: tl.constexpr = (spec.K + BLOCK_V - 1) // BLOCK_V
    program = tl.program_id(0)
    tile = program % NUM_TILES
    program = program // NUM_TILES
    head = program % spec.H
    program = program // spec.H
    segment = program % spec.NUM_SEQUENCES
    row = program // spec.NUM_SEQUENCES
    first_chunk = segment * spec.CHUNKS_PER_SEGMENT
    end_chunk = tl.minimum(first_chunk + spec.CHUNKS_PER_SEGMENT, spec.NUM_CHUNKS)
    num_chunks = tl.where(
        (segment >= FIRST_SCANNED_SEGMENT) & (segment < FIRST_SCANNED_SEGMENT + NUM_SCANNED_SEGMENTS),
        end_chunk - first_chunk,
        0,
    )
    columns = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    is_key_channel = (tl.arange(0, BLOCK_K) < spec.K)[:, None]  # the identity of the padding would never vanish
    acc = ((tl.arange(0, BLOCK_K)[:, None] == columns[None, :]) & is_key_channel).to(tl.float32)
    key_head = head // (spec.H // spec.HK)
    state_abs_sum = tl.sum(tl.sum(acc, 1), 0)
    num_chunks_done = first_chunk * 0
    for _ in tl.range(0, MAX_SCANNED_CHUNKS // CHUNKS_PER_DECAY_CHECK, num_stages=1):
        # Gives up on a state that does not lose a bit per chunk, and on NaN.
        decays_fast_enough = state_abs_sum <= tl.exp2((num_chunks_done * -1 + SAFETY_MARGIN_CHUNKS).to(tl.float32))
        if (state_abs_sum > MIN_NORMAL) & decays_fast_enough & (num_chunks_done < num_chunks):
            num_chunks_in_step = tl.minimum(CHUNKS_PER_DECAY_CHECK, num_chunks - num_chunks_done)
            first_step_chunk = first_chunk + num_chunks_done if REVERSE else end_chunk - 1 - num_chunks_done
            next_log2_chunk_decay = load_log2_chunk_decay(gates, row, head, first_step_chunk, 0, BLOCK_K, spec, per)
            for step in tl.range(0, num_chunks_in_step):
                chunk = first_step_chunk + step if REVERSE else first_step_chunk - step
                first_token = chunk * C
                log2_chunk_decay = next_log2_chunk_decay
                # Prefetched by one chunk: see `chunk_fwd_h_kernel`.
                next_log2_chunk_decay = load_log2_chunk_decay(
                    gates, row, head, chunk + 1 if REVERSE else chunk - 1, 0, BLOCK_K, spec, per
                )
                key_base = chunk_address(key, row // per.KEY, first_token, key_head, spec.T, spec.HK, spec.K)
                w_base = chunk_address(w, row // per.W, first_token, head, spec.T, spec.H, spec.K)
                k = load_token_rows(key_base, first_token, spec.T, 0, spec.HK, spec.K, BLOCK_K, spec)
                w_tile = load_token_rows(w_base, first_token, spec.T, 0, spec.H, spec.K, BLOCK_K, spec)
                # M = D - k^T W with the chunk's decay D, so M^T = D - W^T k.
                key_products = dot(w_tile if REVERSE else k, acc.to(k.dtype), spec)
                if spec.QK_ARE_DECAYED:
                    acc *= tl.exp2(log2_chunk_decay)[:, None]
                else:
                    gates_base = gates_address(gates, row, head, chunk, spec, per)
                    gate_sum = load_head_gate_sum(gates_base, 0.0, C, spec)
                    key_products *= tl.exp2(gate_sum - load_head_gate_cumsum(gates_base, 0.0, 0, C, spec))[:, None]
                    acc *= tl.exp2(gate_sum)
                acc = add_dot(acc, tl.trans(k if REVERSE else w_tile), (-key_products).to(k.dtype), spec)
            num_chunks_done += num_chunks_in_step
            state_abs_sum = tl.sum(tl.sum(tl.abs(acc), 1), 0)
    num_chunks_done = tl.where(
        (state_abs_sum <= MIN_NORMAL) | (num_chunks == 0), num_chunks_done, CHUNKS_IF_NEVER_DECAYED
    )
    tl.store(
        chunks_until_decayed + ((row * spec.NUM_SEQUENCES + segment) * spec.H + head) * NUM_TILES + tile,
        num_chunks_done,
    )
