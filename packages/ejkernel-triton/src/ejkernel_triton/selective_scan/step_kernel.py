# pyright: basic, reportIndexIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalMemberAccess=false, reportGeneralTypeIssues=false
"""The decode step of the selective scan: a few tokens against states in memory, each read once and written once.

    states in HBM  [BLOCK_E, N] -- load --> registers ------------------------------> store, in place where donated
    A                           -- load --> registers
    tokens                          load 0 | load 1            | load 2 ...
                                           | decay, write,     | decay, write,
                                           | read, store 0     | read, store 1

A channel's N numbers lie side by side, so a tile is one piece of memory, and sums over them stay among a few lanes of a
warp. A program may have the same channels of several sequences, and keep A: it loads the state of the next one ahead.
"""

import triton
import triton.language as tl

from ejkernel_triton.blocks import LOG2E, at_batch


@triton.jit
def load_token(x, step, write, read, token, there, channels, numbers, spec: tl.constexpr):
    """What a token brings: x and dt by channels, B and C by numbers; zeros where there is none."""
    # Vectors and no scalars: the interpreter has no & of a vector and a scalar.
    of_channels = channels < tl.where(there > 0, spec.E, 0)
    of_numbers = numbers < tl.where(there > 0, spec.N, 0)
    return (
        tl.load(x + token * spec.E + channels, mask=of_channels, other=0.0).to(tl.float32),
        tl.load(step + token * spec.E + channels, mask=of_channels, other=0.0).to(tl.float32),
        tl.load(write + token * spec.N + numbers, mask=of_numbers, other=0.0).to(tl.float32),
        tl.load(read + token * spec.N + numbers, mask=of_numbers, other=0.0).to(tl.float32),
    )


@triton.jit
def sequence_of(bounds, slots, sequence, spec: tl.constexpr):
    """Where a sequence's tokens begin and end, where its state is, and whether it has one there."""
    # 64 bits: a token's number times its stride may have more than 31.
    place = tl.cast(sequence, tl.int64)
    first = place * 0
    end = first + spec.T
    there = sequence < spec.SEQUENCES
    if spec.PACKED:
        first = tl.load(bounds + sequence, mask=there, other=0, eviction_policy="evict_last").to(tl.int64)
        end = tl.load(bounds + sequence + 1, mask=there, other=0, eviction_policy="evict_last").to(tl.int64)
    used = tl.cast(there, tl.int32)
    if spec.SLOTS > 0:
        place = tl.load(slots + sequence, mask=there, other=-1, eviction_policy="evict_last").to(tl.int64)
        # A sequence without tokens leaves its slot alone, which may be another's too.
        used = tl.cast((place >= 0) & (place < spec.SLOTS) & (end > first), tl.int32)
    return first, end, place, used


@triton.jit
def load_state(source, place, used, channels, numbers, spec: tl.constexpr):
    """A tile of a sequence's state to begin with, in float32; zeros where there is none."""
    BLOCK_E: tl.constexpr = spec.BLOCK_E
    BLOCK_N: tl.constexpr = spec.BLOCK_N
    if spec.STATE:
        at = source + place * (spec.E * spec.N) + channels[:, None] * spec.N + numbers[None, :]
        mask = (channels < tl.where(used > 0, spec.E, 0))[:, None] & (numbers < spec.N)[None, :]
        return tl.load(at, mask=mask, other=0.0).to(tl.float32)
    else:
        return tl.zeros([BLOCK_E, BLOCK_N], tl.float32)


@triton.jit
def zero_outputs(output, first, end, step, channels, spec: tl.constexpr):
    """Writes 0 to the outputs of every step-th token of no sequence."""
    BLOCK_E: tl.constexpr = spec.BLOCK_E
    zeros = tl.zeros([BLOCK_E], tl.float32).to(output.dtype.element_ty)
    for token in tl.range(first, end, step):
        tl.store(output + token * spec.E + channels, zeros, mask=channels < spec.E)


@triton.jit
def scan_step_kernel(
    x,
    step,
    decay,
    write,
    read,
    skip,
    bounds,
    slots,
    initial,
    output,
    final,
    spec: tl.constexpr,
    per: tl.constexpr,
):
    """One tile of channels of a few sequences, one after the other, through all of their tokens.

    In place, `final` has the initial states: a program reads its tile before it writes it, and no other has that tile.
    """
    program = tl.program_id(0)
    tile = program % spec.TILES
    sequence = program // spec.TILES % spec.GROUPS * spec.LOOP
    row = tl.cast(program // (spec.TILES * spec.GROUPS), tl.int64)
    channels, numbers = tile * spec.BLOCK_E + tl.arange(0, spec.BLOCK_E), tl.arange(0, spec.BLOCK_N)
    if spec.PACKED:
        bounds = at_batch(bounds, row, per.BOUNDS, spec.SEQUENCES + 1)
    if spec.SLOTS > 0:
        slots = at_batch(slots, row, per.SLOTS, spec.SEQUENCES)
    STATES: tl.constexpr = (spec.SLOTS if spec.SLOTS > 0 else spec.SEQUENCES) * spec.E * spec.N
    target = final + row * STATES
    source = target
    if spec.STATE and not spec.IN_PLACE:
        source = at_batch(initial, row, per.INITIAL, STATES)
    first, end, place, used = sequence_of(bounds, slots, sequence, spec)
    # The state comes first, for it is what memory is busy with.
    state = load_state(source, place, used, channels, numbers, spec)
    at, inside = (
        channels[:, None] * spec.N + numbers[None, :],
        (channels < spec.E)[:, None] & (numbers < spec.N)[None, :],
    )
    rates = at_batch(decay, row, per.DECAY, spec.E * spec.N) + at
    # Read again by programs of other sequences.
    rates = tl.load(rates, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32) * LOG2E
    weight = tl.load(at_batch(skip, row, per.SKIP, spec.E) + channels, mask=channels < spec.E, other=0.0)
    x, step = at_batch(x, row, per.X, spec.T * spec.E), at_batch(step, row, per.STEP, spec.T * spec.E)
    write, read = at_batch(write, row, per.WRITE, spec.T * spec.N), at_batch(read, row, per.READ, spec.T * spec.N)
    output += row * spec.T * spec.E
    for n in tl.range(0, spec.LOOP):
        # Under way while this sequence's tokens are worked on.
        later = tl.where(n + 1 < spec.LOOP, sequence + 1, spec.SEQUENCES)
        next_first, next_end, next_place, next_used = sequence_of(bounds, slots, later, spec)
        next_state = load_state(source, next_place, next_used, channels, numbers, spec)
        end = tl.where(sequence < spec.SEQUENCES, end, first)
        value, dt, b, c = load_token(
            x, step, write, read, first, tl.cast(first < end, tl.int32), channels, numbers, spec
        )
        for token in tl.range(first, end):
            # Issued before this token's arithmetic, which hides it.
            next_value, next_dt, next_b, next_c = load_token(
                x, step, write, read, token + 1, tl.cast(token + 1 < end, tl.int32), channels, numbers, spec
            )
            state = tl.exp2(rates * dt[:, None]) * state + (dt * value)[:, None] * b[None, :]
            made = tl.sum(state * c[None, :], axis=1) + weight.to(tl.float32) * value
            tl.store(output + token * spec.E + channels, made.to(output.dtype.element_ty), mask=channels < spec.E)
            value, dt, b, c = next_value, next_dt, next_b, next_c
        # In place, the tile was read before by this program alone.
        mask = (channels < tl.where(used > 0, spec.E, 0))[:, None] & (numbers < spec.N)[None, :]
        tl.store(target + place * (spec.E * spec.N) + at, state.to(final.dtype.element_ty), mask=mask)
        if spec.PACKED:
            # The programs of all sequences share the tokens of none, which lie before the first and behind the last.
            before, behind = tl.load(bounds).to(tl.int64), tl.load(bounds + spec.SEQUENCES).to(tl.int64)
            there = tl.cast(sequence < spec.SEQUENCES, tl.int64)
            zero_outputs(output, tl.cast(sequence, tl.int64), before * there, spec.SEQUENCES, channels, spec)
            zero_outputs(output, behind + sequence, spec.T * there, spec.SEQUENCES, channels, spec)
        state, first, end, place, used = next_state, next_first, next_end, next_place, next_used
        sequence += 1
