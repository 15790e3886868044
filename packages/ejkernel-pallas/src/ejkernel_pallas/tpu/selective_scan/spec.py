"""The compile-time constants of the selective scan's kernels."""

import dataclasses

from ejkernel.arithmetic import cdiv
from ejkernel.families.selective_scan import INTERVAL, SelectiveScan
from ejkernel_pallas.tpu.mosaic.vectors import LANES
from ejkernel_pallas.tpu.selective_scan.config import GROUP, TpuScan

CHUNK = INTERVAL
"""Tokens of a chunk: the state before each is a residual."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScanSpec:
    """Constants of a kernel.

    Attributes:
        size: E.
        channels: I.
        groups: Groups of 1024 channels of a grid step.
        unroll: Tokens whose code is emitted one after another.
        tiles: Grid steps over channels.
        tokens: T, of rows that are not packed; their last chunk may have fewer tokens.
        chunks: Of a row.
        packed: Whether the chunks are of packed sequences, each of which begins one.
    """

    size: int
    channels: int
    groups: int
    unroll: int
    tiles: int
    tokens: int
    chunks: int
    packed: bool

    @property
    def block(self) -> int:
        """Channels of a grid step."""
        return self.groups * GROUP

    @property
    def cut(self) -> bool:
        """Returns whether the last grid step has lanes without channels."""
        return self.channels % self.block > 0

    @property
    def has_partial_chunk(self) -> bool:
        """Returns whether the last chunk of a row has positions past the row's last token."""
        return not self.packed and self.tokens % CHUNK > 0


def make_spec(record: SelectiveScan, config: TpuScan, chunks: int) -> ScanSpec:
    """Returns the constants of a record's kernels."""
    _, tokens, channels = record.x.shape
    return ScanSpec(
        size=record.decay.shape[1],
        channels=channels,
        groups=config.block_channels // GROUP,
        unroll=config.unroll,
        tiles=cdiv(channels, config.block_channels),
        tokens=tokens,
        chunks=chunks,
        packed=record.cu_seqlens is not None,
    )


OCTET = 8
"""Tokens of a register's rows."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateSpec:
    """Constants of the kernel that updates states in slots.

    Attributes:
        size: E.
        block: Channels of a grid step: all, or a multiple of 128.
        tokens: Tokens of an octet: 8, or fewer where sequences have fewer.
        octets: Octets of a chunk.
        tiles: Grid steps over channels.
    """

    size: int
    block: int
    tokens: int
    octets: int
    tiles: int

    @property
    def chunk(self) -> int:
        """Returns the tokens of a chunk."""
        return self.tokens * self.octets


def make_update_spec(record: SelectiveScan, config: TpuScan) -> UpdateSpec:
    """Returns the constants of the kernel for a record whose states are in slots."""
    chunk, channels = update_chunk(record), record.x.shape[2]
    tiles = cdiv(channels, config.block_channels)
    return UpdateSpec(
        size=record.decay.shape[1],
        block=channels if tiles == 1 else cdiv(cdiv(channels, tiles), LANES) * LANES,
        tokens=min(chunk, OCTET),
        octets=max(1, chunk // OCTET),
        tiles=tiles,
    )


def update_chunk(record: SelectiveScan) -> int:
    """Returns the tokens of a chunk: the mean of the tokens of a sequence, rounded up to a power of two up to 64."""
    sequences = 1 if record.cu_seqlens is None else record.cu_seqlens.shape[0] - 1
    mean = cdiv(record.x.shape[1], max(1, sequences))
    return min(CHUNK, 1 << (mean - 1).bit_length())
