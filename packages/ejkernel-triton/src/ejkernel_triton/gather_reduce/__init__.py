"""Gather-reduce in Triton, for GPUs from Ampere on and AMD's through HIP."""

from collections.abc import Iterable
from typing import Any

from ejkernel.ops import ConfigSpace, Implementation
from ejkernel_triton.gather_reduce import config
from ejkernel_triton.requirements import triton_implementation, triton_requires


def _reasons(record: Any) -> Iterable[str]:
    """Yields the reasons to refuse a record that `Requires` cannot express."""
    if not (record.rows.size and record.indices.size and record.inverse.size):
        yield "an array is empty"


def implementations() -> tuple[Implementation, ...]:
    """Returns the implementation, which also serves CPUs if Triton's interpreter is enabled."""
    return (
        triton_implementation(
            "gather_reduce",
            forward="gather_reduce.forward:forward",
            backward="gather_reduce.backward:backward",
            gradients=frozenset({"rows", "weights"}),
            requires=triton_requires(handles={"weights"}, extra=_reasons),
            config=ConfigSpace(
                forward=config.GatherTiles,
                backward=config.GatherTiles,
                faces=config.FACES,
                heuristic=config.heuristic,
                candidates=config.candidates,
            ),
        ),
    )
