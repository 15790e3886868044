"""Splits a long row into segments that run in parallel."""

from typing import NamedTuple

from ejkernel_triton.linear_recurrence.spec import RecurrenceSpec


class SubSegmentPlan(NamedTuple):
    """The sub-segments of a row's segments, which are scanned in parallel before the segments are.

    Attributes:
        sub_segments_per_segment: Sub-segments of each segment.
        chunks_per_sub_segment: Chunks of each sub-segment.
        first_scanned_sub_segment: Index of the first sub-segment that is scanned.
        num_scanned_sub_segments: How many sub-segments are scanned.
        num_scans_with_final_state: How many of those, from the first on, need the final state of their scan from zeros.
        reverse: Whether scans go from the last chunk to the first.
        row_starts_from_zeros: Whether the row begins with zeros.
    """

    sub_segments_per_segment: int
    chunks_per_sub_segment: int
    first_scanned_sub_segment: int
    num_scanned_sub_segments: int
    num_scans_with_final_state: int
    reverse: bool
    row_starts_from_zeros: bool


def plan_sub_segments(
    spec: RecurrenceSpec, *, reverse: bool, row_starts_from_zeros: bool, scan_last_segment: bool = False
) -> SubSegmentPlan:
    """Returns the sub-segments to scan for the segments' initial states: all but the last, or the first in reverse.

    Args:
        spec: Constants.
        reverse: Whether scans go from the last chunk to the first.
        row_starts_from_zeros: Whether the row begins with zeros.
        scan_last_segment: Whether all segments are scanned, for their transitions.
    """
    sub_segments_per_segment = _sub_segments_per_segment(spec)
    # Sub-segments have the same number of chunks.
    while sub_segments_per_segment > 1 and (
        spec.CHUNKS_PER_SEGMENT % sub_segments_per_segment or spec.NUM_CHUNKS % spec.CHUNKS_PER_SEGMENT
    ):
        sub_segments_per_segment //= 2
    num_scans_with_final_state = (spec.NUM_SEQUENCES - 1) * sub_segments_per_segment
    return SubSegmentPlan(
        sub_segments_per_segment=sub_segments_per_segment,
        chunks_per_sub_segment=spec.CHUNKS_PER_SEGMENT // sub_segments_per_segment,
        first_scanned_sub_segment=sub_segments_per_segment if reverse else 0,
        num_scanned_sub_segments=num_scans_with_final_state + sub_segments_per_segment * scan_last_segment,
        num_scans_with_final_state=num_scans_with_final_state,
        reverse=reverse,
        row_starts_from_zeros=row_starts_from_zeros,
    )


def _sub_segments_per_segment(spec: RecurrenceSpec) -> int:
    """Returns the sub-segments per segment: more of them hide more latency, but take longer to merge.

    Measured with 4 segments of 65536 tokens (docs/lab/linear_recurrence_gpu.md). With the delta rule each merge is a
    sequence of dependent products, 8 microseconds.
    """
    if spec.HAS_DELTA_RULE:
        return 1
    return 16 if spec.HAS_CONSTANT_GATES else 4 if spec.GATE_CHANNELS < 2 else 2
