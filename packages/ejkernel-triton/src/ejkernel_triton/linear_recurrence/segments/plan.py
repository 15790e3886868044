"""Splits a long row into segments that run in parallel."""

from typing import NamedTuple

from ejkernel_triton.linear_recurrence.spec import RecurrenceSpec


class SubSegmentPlan(NamedTuple):
    """The sub-segments of a row's segments, which are scanned in parallel before the segments are.

    Attributes:
        sub_segments_per_segment: Sub-segments of each segment.
        chunks_per_sub_segment: Chunks of each sub-segment.
        first_scanned: Index of the first sub-segment that is scanned.
        num_scanned: How many sub-segments are scanned.
        num_end_states: How many of those, from the first on, need the final state of their scan from zeros.
        reverse: Whether scans go from the last chunk to the first.
        zero_start: Whether the row begins with zeros.
    """

    sub_segments_per_segment: int
    chunks_per_sub_segment: int
    first_scanned: int
    num_scanned: int
    num_end_states: int
    reverse: bool
    zero_start: bool


def plan_sub_segments(
    spec: RecurrenceSpec, *, reverse: bool, zero_start: bool, scan_last_segment: bool = False
) -> SubSegmentPlan:
    """Returns the sub-segments to scan for the segments' initial states: all but the last, or the first in reverse.

    Args:
        spec: Constants.
        reverse: Whether scans go from the last chunk to the first.
        zero_start: Whether the row begins with zeros.
        scan_last_segment: Whether all segments are scanned, for their transitions.
    """
    sub_segments_per_segment = _sub_segments_per_segment(spec)
    # Sub-segments have the same number of chunks.
    while sub_segments_per_segment > 1 and (
        spec.CHUNKS_PER_SEGMENT % sub_segments_per_segment or spec.NUM_CHUNKS % spec.CHUNKS_PER_SEGMENT
    ):
        sub_segments_per_segment //= 2
    num_end_states = (spec.NUM_SEQUENCES - 1) * sub_segments_per_segment
    return SubSegmentPlan(
        sub_segments_per_segment=sub_segments_per_segment,
        chunks_per_sub_segment=spec.CHUNKS_PER_SEGMENT // sub_segments_per_segment,
        first_scanned=sub_segments_per_segment if reverse else 0,
        num_scanned=num_end_states + sub_segments_per_segment * scan_last_segment,
        num_end_states=num_end_states,
        reverse=reverse,
        zero_start=zero_start,
    )


def _sub_segments_per_segment(spec: RecurrenceSpec) -> int:
    """Returns the sub-segments per segment: more of them hide more latency, but take longer to merge.

    Measured with 4 segments of 65536 tokens (docs/lab/linear_recurrence_gpu.md). With the delta rule each merge is a
    sequence of dependent products, 8 microseconds.
    """
    if spec.HAS_DELTA_RULE:
        return 1
    return 16 if spec.HAS_CONSTANT_GATES else 4 if spec.GATES_PER_HEAD < 2 else 2
