"""Splits a long row into segments that run in parallel."""

from typing import NamedTuple

from ejkernel_triton.linear_recurrence.spec import RecurrenceSpec


class SegmentSplit(NamedTuple):
    """The sub-segments of a row's segments, which are scanned in parallel before the segments are.

    Attributes:
        sub_segments: Sub-segments of each segment.
        chunks: Chunks of each sub-segment.
        offset: Index of the first sub-segment that is scanned.
        scans: How many sub-segments are scanned.
        num_end_states: How many of those, from the first on, need the final state of their scan from zeros.
        reverse: Whether scans go from the last chunk to the first.
        zero_start: Whether the row begins with zeros.
    """

    sub_segments: int
    chunks: int
    offset: int
    scans: int
    num_end_states: int
    reverse: bool
    zero_start: bool


def split_segments(spec: RecurrenceSpec, *, reverse: bool, zero_start: bool, every: bool = False) -> SegmentSplit:
    """Returns the sub-segments to scan for the segments' initial states: all but the last, or the first in reverse.

    Args:
        spec: Constants.
        reverse: Whether scans go from the last chunk to the first.
        zero_start: Whether the row begins with zeros.
        every: Whether all segments are scanned, for their transitions.
    """
    sub_segments = _sub_segments(spec)
    # Sub-segments have the same number of chunks.
    while sub_segments > 1 and (spec.PER_SEQUENCE % sub_segments or spec.CHUNKS % spec.PER_SEQUENCE):
        sub_segments //= 2
    num_end_states = (spec.SEQUENCES - 1) * sub_segments
    return SegmentSplit(
        sub_segments=sub_segments,
        chunks=spec.PER_SEQUENCE // sub_segments,
        offset=sub_segments if reverse else 0,
        scans=num_end_states + sub_segments * every,
        num_end_states=num_end_states,
        reverse=reverse,
        zero_start=zero_start,
    )


def _sub_segments(spec: RecurrenceSpec) -> int:
    """Returns the sub-segments per segment: more of them hide more latency, but take longer to merge.

    Measured with 4 segments of 65536 tokens (docs/lab/linear_recurrence_gpu.md). With the delta rule each merge is a
    sequence of dependent products, 8 microseconds.
    """
    if spec.DELTA:
        return 1
    return 16 if spec.CONSTANT else 4 if spec.WIDTH < 2 else 2
