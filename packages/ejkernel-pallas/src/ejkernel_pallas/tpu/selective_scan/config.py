"""The configuration of the selective scan's kernels: the heuristic, and the candidates worth measuring."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from ejkernel.arithmetic import cdiv
from ejkernel.families.selective_scan import FAMILY, SelectiveScan
from ejkernel.ops.params import Direction
from ejkernel.planning.fixed_sizes import with_fixed_sizes
from ejkernel_pallas.tpu.generations import num_cores
from ejkernel_pallas.tpu.interpret import is_interpreting

CHANNELS_PER_GROUP = 1024
"""Channels of one token in a register of float32: eight rows of 128."""
MAX_CHANNEL_GROUPS = 4
"""The largest number of groups in a grid step: the arrays of its tokens take 16 MiB of VMEM."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TpuScan:
    """The configuration of either pass.

    Attributes:
        block_channels: The number of channels of a grid step, a multiple of 1024. B and C of a chunk are repeated in
            all lanes of registers once per step.
        unroll: The number of tokens whose code is emitted one after another: 1, 2, 4 or 8.
    """

    block_channels: int
    unroll: int

    def __post_init__(self) -> None:
        if (
            self.block_channels < CHANNELS_PER_GROUP
            or self.block_channels % CHANNELS_PER_GROUP
            or self.block_channels > MAX_CHANNEL_GROUPS * CHANNELS_PER_GROUP
        ):
            largest = MAX_CHANNEL_GROUPS * CHANNELS_PER_GROUP
            wants = f"a multiple of {CHANNELS_PER_GROUP} up to {largest}, whose tokens fit VMEM"
            raise ValueError(f"block_channels: got {self.block_channels}, wants {wants}")
        if self.unroll not in UNROLL_FACTORS:
            raise ValueError(f"unroll: got {self.unroll}, wants one of {', '.join(map(str, UNROLL_FACTORS))}")


UNROLL_FACTORS = (1, 2, 4, 8)

PUBLIC_FIELDS = {"block_d": "block_channels"}
"""Maps fields of the public configuration to fields of this one."""


def heuristic(record: SelectiveScan, device: Any, direction: Direction) -> TpuScan:
    """Returns the configuration for a record. It is not measured: the profile predicts it as the fastest on v5e."""
    # A grid step that updates a slot takes 0.3 us plus the time of its channels, so it has as many as fit VMEM.
    in_slots = record.state_slots is not None and direction == "forward"
    groups_per_step = MAX_CHANNEL_GROUPS if in_slots else 2
    # Rows and tiles of channels are what cores share; slots are updated for one row.
    cores = num_cores(device) if in_slots or record.x.shape[0] < num_cores(device) else 1
    # An interpreter gains nothing from long code, and takes long to compile it.
    return TpuScan(
        block_channels=min(groups_per_step, max(1, _num_channel_groups(record) // cores)) * CHANNELS_PER_GROUP,
        unroll=1 if is_interpreting() else 8,
    )


def batch_invariant(record: SelectiveScan, device: Any, direction: Direction) -> TpuScan:
    """Returns the configuration of all calls in a `batch_invariant` block; no sum is over channels or tokens."""
    return heuristic(with_fixed_sizes(record, FAMILY.axes_of(record), {"b": 1, "t": 1}), device, direction)


def invariance_limits(record: SelectiveScan) -> Iterator[str]:
    """Yields why rows of a record depend on the rest of its call."""
    if record.state_slots is not None:
        yield "state_slots: another kernel updates states in slots"


def candidates(record: SelectiveScan, device: Any, direction: Direction) -> tuple[TpuScan, ...]:
    """Returns configurations worth measuring."""
    first = heuristic(record, device, direction)
    block_sizes = (n * CHANNELS_PER_GROUP for n in (1, 2, 4) if n <= _num_channel_groups(record))
    configs = (dataclasses.replace(first, block_channels=n) for n in block_sizes)
    return tuple(dict.fromkeys((first, *configs)))


def _num_channel_groups(record: SelectiveScan) -> int:
    """Returns the number of groups of 1024 that all channels take."""
    return cdiv(record.x.shape[2], CHANNELS_PER_GROUP)
