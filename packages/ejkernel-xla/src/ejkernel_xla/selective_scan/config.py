"""How the tokens of a chunk are combined: the heuristic, and the candidates that are worth measuring."""

import dataclasses
from typing import Any

from ejkernel.families.selective_scan import SelectiveScan
from ejkernel.ops.params import Direction


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScanSteps:
    """How the tokens of a chunk are combined, in both passes.

    Attributes:
        associative: As a tree, which is more work in fewer steps; else one after the other.
        batch_invariant: Whether each row is computed alone, one token at a time.
    """

    associative: bool
    batch_invariant: bool = False


PUBLIC_FIELDS = {"associative": "associative"}
"""Public fields that set fields of the config, with the fields' names."""


def heuristic(record: SelectiveScan, device: Any, direction: Direction) -> ScanSteps:
    """Returns the way for a record on a device, not measured: a CPU has no idle lanes that could do a tree's extra
    work.
    """
    return ScanSteps(associative=device.platform != "cpu")


def batch_invariant(record: SelectiveScan, device: Any, direction: Direction) -> ScanSteps:
    """Returns the way of all calls in a `batch_invariant` block."""
    return ScanSteps(associative=False, batch_invariant=True)


def candidates(record: SelectiveScan, device: Any, direction: Direction) -> tuple[ScanSteps, ...]:
    """Ways worth measuring for a record on a device."""
    return tuple(ScanSteps(associative=associative) for associative in (False, True))
