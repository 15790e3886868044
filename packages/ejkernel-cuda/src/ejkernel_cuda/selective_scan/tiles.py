"""How the channels of the scan and the numbers of their states are spread over threads."""

import dataclasses

from ejkernel.families.selective_scan import SelectiveScan
from ejkernel.ops.config.params import Direction
from ejkernel.ops.device import DeviceInfo

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

TILES = (ScanTile(channels=2, lanes=2), ScanTile(channels=2, lanes=4), ScanTile(channels=1, lanes=4))
"""Those for multiples of `PIECE_CHANNELS`, the one with the fewest instructions an element first."""

WARPS = 1024
"""As many warps are enough: two for each scheduler of the largest chips."""


def heuristic(record: SelectiveScan, device: DeviceInfo, direction: Direction) -> ScanTile | GradientTile:
    """The tile with the fewest instructions that fills the chip, or the one with the most warps."""
    if direction == "backward":
        return GradientTile(warpgroups=1)
    rows, _, channels = record.x.shape
    if channels % PIECE_CHANNELS:
        return ANY
    # On an H200 (docs/lab/selective_scan_gpu.md) 2 channels of 2 lanes take 0.77 ms with 32768 channels in all, 2 of 4
    # lanes 0.47 with 16384, and 1 of 4 lanes 0.25 with 4096.
    return next((tile for tile in TILES if rows * channels // tile.warp_channels >= WARPS), TILES[-1])


def candidates(record: SelectiveScan, device: DeviceInfo, direction: Direction) -> tuple[ScanTile | GradientTile, ...]:
    """All tiles that the library has for a record."""
    if direction == "backward":
        return tuple(GradientTile(warpgroups=n) for n in (1, 2))
    return (ANY,) if record.x.shape[2] % PIECE_CHANNELS else (*TILES, ANY)


def padded(size: int, tile: ScanTile) -> int:
    """Numbers that a state has in the forward kernel."""
    return 8 if size <= 8 and tile == TILES[0] else LARGEST
