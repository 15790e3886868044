"""How the channels of the scan and the numbers of their states are spread over threads."""

import dataclasses

from ejkernel.families.selective_scan import SelectiveScan
from ejkernel.ops.config.params import Direction
from ejkernel.ops.device import DeviceInfo

LARGEST = 16
"""Numbers of a state that the kernels hold."""

PIECE_CHANNELS = 8
"""Rows of so many channels, or of multiples, begin where copies of 16 bytes can."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScanTile:
    """The configuration of the kernel.

    Attributes:
        channels: Neighbouring channels of a thread, which reads B and C once for all of them.
        lanes: Lanes that share the numbers of a channel's state.
        unrolled: Tokens of the unrolled loop.
    """

    channels: int
    lanes: int
    unrolled: int


ANY = ScanTile(channels=1, lanes=1, unrolled=4)
"""The tile for any number of channels."""


def heuristic(record: SelectiveScan, device: DeviceInfo, direction: Direction) -> ScanTile:
    """Two channels of half a state each, where rows begin at multiples of 16 bytes."""
    return ANY if record.x.shape[2] % PIECE_CHANNELS else ScanTile(channels=2, lanes=2, unrolled=4)


def candidates(record: SelectiveScan, device: DeviceInfo, direction: Direction) -> tuple[ScanTile, ...]:
    """All tiles that the library has for a record."""
    first = heuristic(record, device, direction)
    found = [first, ANY]
    if (
        first != ANY
        and record.x.dtype.itemsize == 2
        and record.step.dtype == record.x.dtype
        and padded(record.decay.shape[1]) == LARGEST
    ):
        shapes = ((2, 2, 8), (2, 2, 16), (2, 1, 4), (4, 2, 4), (4, 2, 8), (4, 4, 4))
        found += [ScanTile(channels=c, lanes=n, unrolled=u) for c, n, u in shapes]
    return tuple(dict.fromkeys(found))


def padded(size: int) -> int:
    """Numbers that a state has in the kernel."""
    return 8 if size <= 8 else LARGEST
