"""How the channels of the scan and the numbers of their states are spread over threads."""

import dataclasses

from ejkernel.families.selective_scan import SelectiveScan
from ejkernel.families.selective_scan.scan_sequences import sequences
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.params import Direction

LARGEST = 16
"""Numbers of a state that the kernels hold."""

PIECE_CHANNELS = 8
"""Rows of so many channels, or of multiples, begin where copies of 16 bytes can."""

WARPGROUP_CHANNELS = 128
"""Channels of a warpgroup of the backward kernel, which adds up dB and dC over them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScanTile:
    """The configuration of the forward kernel.

    Attributes:
        channels: Neighbouring channels of a thread, which reads B and C once for all of them.
        lanes: Lanes that share the numbers of a channel's state.
    """

    channels: int
    lanes: int

    @property
    def warp_channels(self) -> int:
        """Channels of a warp."""
        return 32 // self.lanes * self.channels


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradientTile:
    """The configuration of the backward kernel.

    Attributes:
        warpgroups: Warpgroups of a block, 1 or 2; two alternate between the passes (ping-pong scheduling).
    """

    warpgroups: int


ANY = ScanTile(channels=1, lanes=1)
"""The tile for any number of channels."""

WIDE, EVEN, NARROW = (ScanTile(channels=c, lanes=n) for c, n in ((2, 2), (2, 4), (1, 4)))
"""Those for multiples of `PIECE_CHANNELS`, the one with the fewest instructions an element first."""

ENOUGH_WARPS = {WIDE: 1024, EVEN: 512}
"""Warps from which on a tile is faster than the next, which has more of them for the same channels.

Measured on an H200 (docs/lab/selective_scan_gpu.md) with 4096 channels and 1, 2, 4 and 8 rows.
"""

BUSY_WARPGROUPS = 256
"""Warpgroups from which on pairs of them in a block are 2% faster; of fewer, pairs would leave multiprocessors idle."""


def warpgroups(record: SelectiveScan) -> int:
    """Warpgroups of the backward kernel."""
    return sequences(record) * -(-record.x.shape[2] // WARPGROUP_CHANNELS)


def heuristic(record: SelectiveScan, device: DeviceInfo, direction: Direction) -> ScanTile | GradientTile:
    """The tile with the fewest instructions that fills the chip, or the one with the most warps."""
    if direction == "backward":
        return GradientTile(warpgroups=2 if warpgroups(record) >= BUSY_WARPGROUPS else 1)
    rows, channels = sequences(record), record.x.shape[2]
    if channels % PIECE_CHANNELS:
        return ANY
    for tile, enough in ENOUGH_WARPS.items():
        if rows * channels // tile.warp_channels >= enough:
            return tile
    return NARROW


def candidates(record: SelectiveScan, device: DeviceInfo, direction: Direction) -> tuple[ScanTile | GradientTile, ...]:
    """All tiles that the library has for a record."""
    if direction == "backward":
        return tuple(GradientTile(warpgroups=n) for n in (1, 2))
    return (ANY,) if record.x.shape[2] % PIECE_CHANNELS else (WIDE, EVEN, NARROW, ANY)


def padded(size: int, tile: ScanTile) -> int:
    """Numbers that a state has in the forward kernel."""
    return 8 if size <= 8 and tile == WIDE else LARGEST
