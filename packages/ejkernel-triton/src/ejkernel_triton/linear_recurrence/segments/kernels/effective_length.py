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
    chunk_base,
    gates_base,
    head_gates,
    last_head_gate,
    load_chunk_decay,
    load_rows,
)

LOG2_MIN_NORMAL = tl.constexpr(-126.0)
"""log2 of the smallest normal float32: states below it count as zero."""

MIN_NORMAL = tl.constexpr(2.0**-126)

UNBOUNDED = tl.constexpr(1 << 30)
"""An effective length of more chunks than there are: the state does not vanish."""

SAFETY_CHUNKS = tl.constexpr(16)
"""Chunks of tolerance in the check that a state loses at least a bit per chunk: 12 for the identity of 64 columns."""

GATES_AT_ONCE = tl.constexpr(32)


@triton.jit
def constant_effective_length(constant, spec: tl.constexpr):
    """Returns the chunks over which a constant gate leaves a nonzero state."""
    # Without decay, the length is over 1.2e9 tokens.
    return (1.0 / tl.minimum(constant, -1e-7) * LOG2_MIN_NORMAL).to(tl.int32) // spec.CHUNK + 1


@triton.jit
def gates_effective_length(
    gates,
    constant,
    row,
    head,
    k_start,
    first,
    last,
    BLOCK_K: tl.constexpr,
    REVERSE: tl.constexpr,
    spec: tl.constexpr,
    per: tl.constexpr,
):
    """Returns an upper bound on the chunks before `last`, in reverse from `first` on, over which a nonzero state is
    left.
    """
    C: tl.constexpr = spec.CHUNK
    if spec.CONSTANT:
        # One more than `decayed_initial_states_kernel` reads.
        return constant_effective_length(constant, spec) + 1
    else:
        base = gates_base(gates, row, head, 0, spec, per)
        channels = k_start + tl.arange(0, BLOCK_K)
        sums = tl.zeros([BLOCK_K], tl.float32)
        if spec.WIDTH > 1:
            sums = tl.where(channels < spec.K, 0.0, LOG2_MIN_NORMAL)  # channels of the padding do not count
        left = tl.max(tl.zeros([BLOCK_K], tl.float32), 0)
        lengths = first * 0
        for begin in tl.range(0, last - first, GATES_AT_ONCE, num_stages=1):
            if left > LOG2_MIN_NORMAL:
                distance = begin + tl.arange(0, GATES_AT_ONCE)
                valid = distance < last - first
                # The last row of a chunk has the sum of its gates.
                at = ((first + distance if REVERSE else last - 1 - distance) * C + (C - 1)) * spec.WIDTH
                if spec.WIDTH == 1:
                    sums += tl.sum(tl.load(base + at, mask=valid, other=0.0), 0)
                else:
                    inside = valid[:, None] & (channels < spec.K)[None, :]
                    sums += tl.sum(tl.load(base + (at[:, None] + channels[None, :]), mask=inside, other=0.0), 0)
                # The channel that decays the least counts.
                left = tl.max(sums, 0)
                lengths += GATES_AT_ONCE
        return tl.where(left > LOG2_MIN_NORMAL, UNBOUNDED, lengths)


@triton.jit
def load_effective_length(lengths, row, segment, head, SEGMENTS: tl.constexpr, TILES: tl.constexpr, spec: tl.constexpr):
    """Returns the effective length of a segment and head: the maximum over tiles of columns, [rows, SEGMENTS, H,
    TILES].
    """
    base = lengths + ((row * SEGMENTS + segment) * spec.H + head) * TILES
    longest = tl.load(base)
    for tile in tl.static_range(1, TILES):
        longest = tl.maximum(longest, tl.load(base + tile))
    return longest


@triton.jit
def effective_length_kernel(
    key,
    gates,
    w,
    lengths,
    spec: tl.constexpr,
    per: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    REVERSE: tl.constexpr,
    OFFSET: tl.constexpr,
    SCANS: tl.constexpr,
    MOST: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Computes a segment's effective length with the delta rule; see `forward.effective_lengths`.

    That is how many of its last chunks the state at its end depends on; in reverse, how many of its first chunks the
    gradient depends on. A program computes BLOCK_V columns of the product of transitions M, starting with the identity:
    of M^T from the last chunk on, in reverse of M from the first on. It checks every GROUP chunks, and gives up after
    MOST.
    """
    C: tl.constexpr = spec.CHUNK
    TILES: tl.constexpr = (spec.K + BLOCK_V - 1) // BLOCK_V
    program = tl.program_id(0)
    tile = program % TILES
    program = program // TILES
    head = program % spec.H
    program = program // spec.H
    segment = program % spec.SEQUENCES
    row = program // spec.SEQUENCES
    first = segment * spec.PER_SEQUENCE
    last = tl.minimum(first + spec.PER_SEQUENCE, spec.CHUNKS)
    chunks = tl.where((segment >= OFFSET) & (segment < OFFSET + SCANS), last - first, 0)
    columns = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = (tl.arange(0, BLOCK_K) < spec.K)[:, None]  # the identity of the padding would never vanish
    acc = ((tl.arange(0, BLOCK_K)[:, None] == columns[None, :]) & inside).to(tl.float32)
    k_head = head // (spec.H // spec.HK)
    left = tl.sum(tl.sum(acc, 1), 0)
    done = first * 0
    for _ in tl.range(0, MOST // GROUP, num_stages=1):
        # Gives up on a state that does not lose a bit per chunk, and on NaN.
        in_time = left <= tl.exp2((done * -1 + SAFETY_CHUNKS).to(tl.float32))
        if (left > MIN_NORMAL) & in_time & (done < chunks):
            count = tl.minimum(GROUP, chunks - done)
            begin = first + done if REVERSE else last - 1 - done
            next_decay = load_chunk_decay(gates, row, head, begin, 0, BLOCK_K, spec, per)
            for step in tl.range(0, count):
                chunk = begin + step if REVERSE else begin - step
                start = chunk * C
                chunk_decay = next_decay
                # Prefetched by one chunk: see `chunk_fwd_h_kernel`.
                next_decay = load_chunk_decay(
                    gates, row, head, chunk + 1 if REVERSE else chunk - 1, 0, BLOCK_K, spec, per
                )
                k_base = chunk_base(key, row // per.KEY, start, k_head, spec.T, spec.HK, spec.K)
                w_base = chunk_base(w, row // per.W, start, head, spec.T, spec.H, spec.K)
                k = load_rows(k_base, start, spec.T, 0, spec.HK, spec.K, BLOCK_K, spec)
                w_tile = load_rows(w_base, start, spec.T, 0, spec.H, spec.K, BLOCK_K, spec)
                # M = D - k^T W with the chunk's decay D, so M^T = D - W^T k.
                answer = dot(w_tile if REVERSE else k, acc.to(k.dtype), spec)
                if spec.DECAYED:
                    acc *= tl.exp2(chunk_decay)[:, None]
                else:
                    g_base = gates_base(gates, row, head, chunk, spec, per)
                    total = last_head_gate(g_base, 0.0, C, spec)
                    answer *= tl.exp2(total - head_gates(g_base, 0.0, 0, C, spec))[:, None]
                    acc *= tl.exp2(total)
                acc = add_dot(acc, tl.trans(k if REVERSE else w_tile), (-answer).to(k.dtype), spec)
            done += count
            left = tl.sum(tl.sum(tl.abs(acc), 1), 0)
    done = tl.where((left <= MIN_NORMAL) | (chunks == 0), done, UNBOUNDED)
    tl.store(lengths + ((row * spec.SEQUENCES + segment) * spec.H + head) * TILES + tile, done)
