"""Where the segments of a long row begin, so that they can be walked at the same time; see `segments_kernel`."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.ops.device import current_device
from ejkernel_triton.chips import chip_of
from ejkernel_triton.launch import Shape, launch
from ejkernel_triton.linear_recurrence import stages
from ejkernel_triton.linear_recurrence.config import MIN_TILE, ChunkPasses
from ejkernel_triton.linear_recurrence.shared_memory import state_stages
from ejkernel_triton.linear_recurrence.spec import RecurrenceCall, RecurrenceSpec
from ejkernel_triton.sizes import padded

REACH_MOST = 128
"""Chunks after which `reaches` stops to look whether the delta rule leaves something of a state."""

REACH_GROUP = 4
"""Chunks between two looks."""

REACH_STAGES = 3
"""Pipeline stages of a program there, at most."""

REACH_COLUMNS = 64
"""Columns of a program there, at most."""


class Walked(NamedTuple):
    """Parts of a row's segments that are walked at the same time, before its segments are.

    Attributes:
        each: Parts a segment.
        chunks: Chunks a part.
        offset: Number of the first part that is walked.
        walks: Parts that are walked.
        ends: Parts, of those, up to which it is of use where the walks from zeros end.
        reverse: Whether walks go from the last chunk to the first.
        no_start: Whether the row begins with zeros.
    """

    each: int
    chunks: int
    offset: int
    walks: int
    ends: int
    reverse: bool
    no_start: bool


def parts_of(spec: RecurrenceSpec, *, reverse: bool, no_start: bool, every: bool = False) -> Walked:
    """What to walk to know where a row's segments begin: all but the last one, in reverse but the first one.

    Args:
        spec: Constants.
        reverse: Whether walks go from the last chunk to the first.
        no_start: Whether the row begins with zeros.
        every: Whether all segments are walked, for what they make of a state.
    """
    each = _parts(spec)
    # Parts have the same number of chunks.
    while each > 1 and (spec.PER_SEQUENCE % each or spec.CHUNKS % spec.PER_SEQUENCE):
        each //= 2
    wanted = (spec.SEQUENCES - 1) * each
    return Walked(
        each=each,
        chunks=spec.PER_SEQUENCE // each,
        offset=each if reverse else 0,
        walks=wanted + each * every,
        ends=wanted,
        reverse=reverse,
        no_start=no_start,
    )


def _parts(spec: RecurrenceSpec) -> int:
    """Parts of a segment: more of them wait for memory at the same time, and more are put together after it.

    Measured with 4 segments of 65536 tokens (docs/lab/linear_recurrence_gpu.md). To put one of the delta rule to those
    before it takes products one after the other, 8 microseconds.
    """
    if spec.DELTA:
        return 1
    return 16 if spec.CONSTANT else 4 if spec.WIDTH < 2 else 2


def reaches(call: RecurrenceCall, correction: jax.Array, walked: Walked) -> jax.Array | None:
    """How many of a segment's last chunks leave something of a state, in reverse of its first ones of a gradient.

    Args:
        call: What the stages share.
        correction: W, [B, T, H, K].
        walked: Which segments, and in which direction.

    Returns:
        [B, SEQUENCES, H, tiles of columns] int32, of which the largest counts; more than there are chunks if the state
        does not vanish in REACH_MOST, and 0 for a segment that is not walked. None if it is not known: without gates,
        and in float16, which has not the range.
    """
    from ejkernel_triton.linear_recurrence.reach_kernel import reach_kernel

    spec, config, batch = call.spec, call.config, correction.shape[0]
    if spec.WIDTH == 0 or correction.dtype == jnp.float16:
        return None
    block = min(REACH_COLUMNS, config.state_block_v)
    tiles, block_k, most = -(-spec.K // block), padded(spec.K, MIN_TILE), min(config.state_stages, REACH_STAGES)
    (made,) = launch(
        reach_kernel,
        (call.key, call.gates, correction),
        [Shape((batch, spec.SEQUENCES, spec.H, tiles), jnp.int32)],
        batch=batch,
        grid=batch * spec.SEQUENCES * spec.H * tiles,
        num_warps=config.state_warps,
        num_stages=state_stages(call, most, block_k=block_k, block_v=block, written=False),
        constants={
            "spec": spec,
            "BLOCK_K": block_k,
            "BLOCK_V": block,
            "REVERSE": walked.reverse,
            "OFFSET": walked.offset,
            "WALKS": walked.walks,
            "MOST": REACH_MOST,
            "GROUP": REACH_GROUP,
        },
    )
    return made


def end_states(
    call: RecurrenceCall,
    left: jax.Array,
    right: jax.Array,
    walked: Walked,
    *,
    correction: jax.Array | None = None,
    reach: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Where the walks of `pass_states` end that begin with zeros, one for each part of a row's segments.

    Args:
        call: What the stages share.
        left: [B, T, heads, K], as for `pass_states`.
        right: [B, T, heads, V], as for `pass_states`.
        walked: Which parts.
        correction: w, [B, T, H, K], as for `pass_states`.
        reach: How far states reach, from `reaches`; with a correction alone.

    Returns:
        [B, parts, H, K, V] float32. With a correction V + K columns: behind V columns those of what a part makes of the
        identity, with nothing written. And, if it is known how far states reach, int32 [B, parts, H]: 0 where nothing
        passes through a part, whose last K columns are undefined.
    """
    batch = left.shape[0]
    spec = dataclasses.replace(call.spec, SEQUENCES=walked.walks, PER_SEQUENCE=walked.chunks)
    columns = spec.V if correction is None else spec.V + spec.K
    outputs = [
        Shape((batch,), jnp.float32),
        Shape((batch, spec.SEQUENCES, spec.H, spec.K, columns), jnp.float32),
        Shape((batch,) if reach is None else (batch, spec.SEQUENCES, spec.H), jnp.int32),
    ]
    constants = {
        "REVERSE": walked.reverse,
        "WRITE": False,
        "TRANSITIONS": correction is not None,
        "OFFSET": walked.offset,
        "NO_START": walked.no_start,
        "ENDS": walked.ends,
        "EACH": walked.each,
        "REACH": 0 if reach is None else reach.shape[3],
    }
    call = dataclasses.replace(call, spec=spec, config=_first_walk(call))
    arrays = (left, right, None, correction, reach)
    return stages.walk_states(call, arrays, outputs, constants)[1:]


def _first_walk(call: RecurrenceCall) -> ChunkPasses:
    """The configuration of a call whose walks store nothing on their way."""
    spec = call.spec
    # More programs a multiprocessor, of which one works while the other waits for its state.
    config = dataclasses.replace(call.config, state_stages=min(call.config.state_stages, 2))
    whole = spec.K == spec.V == 128 and call.query.dtype.itemsize == 2
    if spec.CONSTANT and whole and chip_of(current_device()).architecture == "hopper":
        # Keys and values are read once: 0.568 ms instead of 0.592 for 65536 tokens of lightning attention. Heads that
        # do not decay walk alone, so no second program hides that they wait: a third stage, 0.455 instead of 0.466.
        return dataclasses.replace(config, state_block_k=128, state_block_v=128, state_warps=8, state_stages=3)
    return config


def decayed_starts(
    call: RecurrenceCall, left: jax.Array, right: jax.Array, initial: jax.Array | None, *, reverse: bool = False
) -> jax.Array:
    """Where the walks through the segments of a row begin, [B, SEQUENCES, H, K, V] float32.

    Parts of each segment are walked from zeros first, at the same time as the others and writing nothing but where they
    end. With the decay of whole parts, a few additions then give where each segment begins.

    Args:
        call: What the stages share.
        left: [B, T, heads, K] keys or queries, as `stages.pass_states` takes them.
        right: [B, T, heads, V] values or the output's cotangent, as `stages.pass_states` takes them.
        initial: [B, 1, H, K, V], where the first walk begins; None is zeros.
        reverse: Whether to walk from the last chunk to the first.
    """
    from ejkernel_triton.linear_recurrence.segments_kernel import decayed_starts_kernel

    spec, batch = call.spec, left.shape[0]
    walked = parts_of(spec, reverse=reverse, no_start=initial is None)
    # Float32 ends: their rounding would reach every later segment.
    ends, _ = end_states(call, left, right, walked)
    block_k, block_v = (min(32, padded(n, MIN_TILE)) for n in (spec.K, spec.V))
    first = None if initial is None else initial[:, 0]
    (made,) = launch(
        decayed_starts_kernel,
        (ends, call.gates, first),
        [Shape((batch, spec.SEQUENCES, spec.H, spec.K, spec.V), jnp.float32)],
        batch=batch,
        grid=batch * spec.H * -(-spec.K // block_k) * -(-spec.V // block_v),
        num_warps=4,
        num_stages=1,
        constants={
            "spec": spec,
            "SEGMENTS": spec.SEQUENCES,
            "PARTS": walked.each,
            "BLOCK_K": block_k,
            "BLOCK_V": block_v,
            "PADDED": padded(walked.chunks),
            "FIRST": first is not None,
            "REVERSE": reverse,
        },
    )
    return made


def delta_starts(
    spec: RecurrenceSpec,
    walked: Walked,
    ends: jax.Array,
    transitions: jax.Array,
    first: jax.Array | None,
    used: jax.Array | None,
) -> jax.Array:
    """Where the walks through segments begin, [B, SEQUENCES, H, K, V] float32.

    Args:
        spec: Constants.
        walked: The parts of segments.
        ends: [B, parts, H, K, V or V + K], where walks from zeros end.
        transitions: [B, parts, H, K, V + K], of whose columns the last K count: what parts make of a state, and by
            the transposes, from the last part to the first, of its gradient.
        first: [B, H, K, V], where the row begins, or in reverse the gradient of where it ends; None is zeros.
        used: [B, parts, H], 0 where nothing passes through a part; None if that is not known.
    """
    from ejkernel_triton.linear_recurrence.segments_kernel import delta_starts_kernel

    batch, block_v = ends.shape[0], MIN_TILE
    (made,) = launch(
        delta_starts_kernel,
        (ends, transitions, first, used),
        [Shape((batch, spec.SEQUENCES, spec.H, spec.K, spec.V), jnp.float32)],
        batch=batch,
        grid=batch * spec.H * -(-spec.V // block_v),
        num_warps=4,
        num_stages=2,
        constants={
            "spec": spec,
            "PARTS": spec.SEQUENCES,
            "ENDS": ends.shape[1],
            "WALKED": transitions.shape[1],
            "END_COLUMNS": ends.shape[4],
            "SKIPPED": walked.offset,
            "BLOCK_K": padded(spec.K, MIN_TILE),
            "BLOCK_J": min(padded(spec.K, MIN_TILE), 32),
            "BLOCK_V": block_v,
            "FIRST": first is not None,
            "REVERSE": walked.reverse,
            "SOME": used is not None,
        },
    )
    return made
