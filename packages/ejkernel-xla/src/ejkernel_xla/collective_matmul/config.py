"""Whether transfers are hidden under products: the heuristic, and the candidates that are worth measuring."""

import dataclasses
from typing import Any

from ejkernel.families.collective_matmul import CollectiveMatmul
from ejkernel.families.ring_attention import axis_size
from ejkernel.ops.params import Direction


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectiveSchedule:
    """The configuration of either pass.

    Attributes:
        overlap: Whether the devices' arrays go around a ring while each step multiplies what it has. Otherwise one
            collective of XLA is before or after one product.
    """

    overlap: bool


PUBLIC_FIELDS = {"overlap": "overlap"}
"""Public configuration field -> field of this."""


def heuristic(record: CollectiveMatmul, device: Any, direction: Direction) -> CollectiveSchedule:
    """Returns the schedule for a record on a device.

    Host devices share their cores with the transfers, which therefore cannot be hidden. On two H200 the collective took
    1% to 6% less time than a ring with XLA's latency-hiding scheduler, but 2% more in the forward pass of a
    reduce-scatter in one of two runs (`benchmarks/results/collective_matmul_gpu.md`); more GPUs have not been measured.
    On TPUs neither has been.
    """
    return CollectiveSchedule(overlap=axis_size(record.axis_name) > 1 and device.platform == "tpu")


def candidates(record: CollectiveMatmul, device: Any, direction: Direction) -> tuple[CollectiveSchedule, ...]:
    """Returns the schedules worth measuring for a record on a device."""
    return CollectiveSchedule(overlap=True), CollectiveSchedule(overlap=False)
