"""How the tokens of a chunk are worked on: what is used when nobody chose, and what is worth measuring."""

from typing import Any

from ejkernel.families.selective_scan import SelectiveScan
from ejkernel.modules.operations.configs import StateSpaceV1Config
from ejkernel.ops.config.params import Direction


def heuristic(record: SelectiveScan, device: Any, direction: Direction) -> StateSpaceV1Config:
    """The way for a record on a device, not measured: a CPU has no idle lanes that could do a tree's extra work."""
    return StateSpaceV1Config(associative=device.platform != "cpu")


def candidates(record: SelectiveScan, device: Any, direction: Direction) -> tuple[StateSpaceV1Config, ...]:
    """Ways worth measuring for a record on a device."""
    return tuple(StateSpaceV1Config(associative=associative) for associative in (False, True))
