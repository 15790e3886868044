"""The configurations of the scan: how channels and state elements are spread over threads."""

import dataclasses

from ejkernel.arithmetic import cdiv
from ejkernel.families.selective_scan import SelectiveScan
from ejkernel.families.selective_scan.scan_sequences import sequences
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.params import Direction

MAX_STATE_DIM = 16
"""The largest state dimension of the kernels."""

CHANNEL_ALIGNMENT = 8
"""Channels must be a multiple of this for rows to be aligned for copies of 16 bytes."""

CHANNELS_PER_WARPGROUP = 128
"""Channels per warpgroup of the backward kernel, which adds up dB and dC over them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScanTile:
    """The configuration of the forward kernel.

    Attributes:
        channels: Neighbouring channels per thread, which reads B and C once for all of them.
        lanes: Lanes that split the elements of a channel's state.
    """

    channels: int
    lanes: int

    @property
    def channels_per_warp(self) -> int:
        """Returns the number of channels per warp."""
        return 32 // self.lanes * self.channels


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradientTile:
    """The configuration of the backward kernel.

    Attributes:
        warpgroups: Warpgroups per block, 1 or 2; two alternate between the phases (ping-pong scheduling).
    """

    warpgroups: int


ANY_CHANNELS_TILE = ScanTile(channels=1, lanes=1)
"""The tile for any number of channels."""

WIDE_TILE, MEDIUM_TILE, NARROW_TILE = (ScanTile(channels=c, lanes=n) for c, n in ((2, 2), (2, 4), (1, 4)))
"""The tiles for multiples of `CHANNEL_ALIGNMENT`, from the fewest instructions per element to the most warps."""

MIN_WARPS_BY_TILE = {WIDE_TILE: 1024, MEDIUM_TILE: 512}
"""The number of warps from which on a tile is faster than the next one, which has more warps for the same channels.

Measured on an H200 (docs/lab/selective_scan_gpu.md) with 4096 channels and 1, 2, 4 and 8 rows.
"""

MIN_WARPGROUPS_FOR_TWO_PER_BLOCK = 256
"""The number of warpgroups from which on two per block are 2% faster; with fewer, pairs would leave multiprocessors
idle.
"""


def num_warpgroups(record: SelectiveScan) -> int:
    """Returns the number of warpgroups of the backward kernel."""
    return sequences(record) * cdiv(record.x.shape[2], CHANNELS_PER_WARPGROUP)


def heuristic(record: SelectiveScan, device: DeviceInfo, direction: Direction) -> ScanTile | GradientTile:
    """Returns the tile with the fewest instructions that fills the chip, or else the one with the most warps."""
    if direction == "backward":
        return GradientTile(warpgroups=2 if num_warpgroups(record) >= MIN_WARPGROUPS_FOR_TWO_PER_BLOCK else 1)
    rows, channels = sequences(record), record.x.shape[2]
    if channels % CHANNEL_ALIGNMENT:
        return ANY_CHANNELS_TILE
    for tile, min_warps in MIN_WARPS_BY_TILE.items():
        if rows * channels // tile.channels_per_warp >= min_warps:
            return tile
    return NARROW_TILE


def batch_invariant(record: SelectiveScan, device: DeviceInfo, direction: Direction) -> ScanTile | GradientTile:
    """Returns the tile for calls in a `batch_invariant` block: the number of lanes decides in which order a state is
    summed, and is fixed; the channels of a thread are independent.
    """
    tile = heuristic(record, device, direction)
    return MEDIUM_TILE if tile == WIDE_TILE else tile


def candidates(record: SelectiveScan, device: DeviceInfo, direction: Direction) -> tuple[ScanTile | GradientTile, ...]:
    """Returns all tiles that the library has for a record."""
    if direction == "backward":
        return tuple(GradientTile(warpgroups=n) for n in (1, 2))
    return (
        (ANY_CHANNELS_TILE,)
        if record.x.shape[2] % CHANNEL_ALIGNMENT
        else (WIDE_TILE, MEDIUM_TILE, NARROW_TILE, ANY_CHANNELS_TILE)
    )


def padded_state_dim(state_dim: int, tile: ScanTile) -> int:
    """Returns the padded state dimension of the forward kernel."""
    return 8 if state_dim <= 8 and tile == WIDE_TILE else MAX_STATE_DIM
