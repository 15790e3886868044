"""The configuration of the selective scan's kernels: the heuristic, and the candidates worth measuring."""

import dataclasses
from typing import Any

from ejkernel.arithmetic import cdiv
from ejkernel.families.selective_scan import SelectiveScan
from ejkernel.ops.params import Direction
from ejkernel_pallas.tpu.interpret import is_interpreting

GROUP = 1024
"""Channels of a register of float32: one token's, eight rows of 128."""
MAX_CHANNEL_GROUPS = 4
"""Most groups of a grid step: 16 MiB of VMEM for the arrays of its tokens."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TpuScan:
    """The configuration of either pass.

    Attributes:
        block_channels: Channels of a grid step, a multiple of 1024. B and C of a chunk are spread over the lanes of
            registers once a step.
        unroll: Tokens whose code is emitted one after another: 1, 2, 4 or 8.
    """

    block_channels: int
    unroll: int

    def __post_init__(self) -> None:
        if (
            self.block_channels < GROUP
            or self.block_channels % GROUP
            or self.block_channels > MAX_CHANNEL_GROUPS * GROUP
        ):
            wants = f"a multiple of {GROUP} up to {MAX_CHANNEL_GROUPS * GROUP}, whose tokens fit VMEM"
            raise ValueError(f"block_channels: got {self.block_channels}, wants {wants}")
        if self.unroll not in UNROLL_FACTORS:
            raise ValueError(f"unroll: got {self.unroll}, wants one of {', '.join(map(str, UNROLL_FACTORS))}")


UNROLL_FACTORS = (1, 2, 4, 8)

PUBLIC_FIELDS = {"block_d": "block_channels"}
"""Fields of the public configuration and what they set here."""


def heuristic(record: SelectiveScan, device: Any, direction: Direction) -> TpuScan:
    """Returns the configuration for a record. It is not measured: the profile predicts it as the fastest on v5e."""
    # A grid step that updates a slot takes 0.3 us besides its channels, so it has as many as VMEM holds.
    groups = 2 if record.state_slots is None or direction == "backward" else MAX_CHANNEL_GROUPS
    # An interpreter gains nothing from long code, and takes long to compile it.
    return TpuScan(block_channels=min(groups, _groups(record)) * GROUP, unroll=1 if is_interpreting() else 8)


def candidates(record: SelectiveScan, device: Any, direction: Direction) -> tuple[TpuScan, ...]:
    """Configurations worth measuring."""
    first = heuristic(record, device, direction)
    sizes = (n * GROUP for n in (1, 2, 4) if n <= _groups(record))
    found = (dataclasses.replace(first, block_channels=n) for n in sizes)
    return tuple(dict.fromkeys((first, *found)))


def _groups(record: SelectiveScan) -> int:
    """Groups of all channels."""
    return cdiv(record.x.shape[2], GROUP)
