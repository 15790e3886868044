"""Segment pooling in Triton, for GPUs from Ampere on and AMD's through HIP."""

from collections.abc import Iterable
from typing import Any

from ejkernel.ops import ConfigSpace, Implementation
from ejkernel_triton.requirements import triton_implementation, triton_requires
from ejkernel_triton.segment_pooling import config


def _reasons(record: Any) -> Iterable[str]:
    """Yields the reasons to refuse a record that `Requires` cannot express."""
    if not record.values.size or (record.ranges is not None and not record.ranges.size):
        yield "an array is empty"


def implementations() -> tuple[Implementation, ...]:
    """Returns the implementation, which also serves CPUs if Triton's interpreter is enabled."""
    return (
        triton_implementation(
            "segment_pooling",
            forward="segment_pooling.forward:forward",
            backward="segment_pooling.backward:backward",
            gradients=frozenset({"values"}),
            requires=triton_requires(handles={"lengths", "ranges"}, extra=_reasons),
            config=ConfigSpace(
                forward=config.PoolingForward,
                backward=config.PoolingBackward,
                faces=config.FACES,
                heuristic=config.heuristic,
                candidates=config.candidates,
            ),
        ),
    )
