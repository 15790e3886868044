"""The compile-time constants of the selective scan's kernels."""

import dataclasses

from ejkernel.arithmetic import cdiv
from ejkernel.families.selective_scan import TOKENS_PER_STORED_STATE, SelectiveScan
from ejkernel_pallas.tpu.mosaic.vectors import LANES
from ejkernel_pallas.tpu.selective_scan.config import CHANNELS_PER_GROUP, TpuScan

CHUNK_TOKENS = TOKENS_PER_STORED_STATE
"""The number of tokens of a chunk: the state before each chunk is a residual."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScanSpec:
    """Constants of a kernel.

    Attributes:
        state_size: E, elements of a channel's state.
        channels: I, the number of channels.
        groups_per_step: The number of groups of 1024 channels in a grid step.
        unrolled_tokens: The number of tokens whose code is emitted one after another.
        num_channel_tiles: The number of grid steps over channels.
        tokens_per_row: T, tokens per row; the last chunk of a row that is not packed may have fewer than 64.
        chunks_per_row: The number of chunks per row.
        is_packed: Whether a row has packed sequences, each of which begins a chunk.
    """

    state_size: int
    channels: int
    groups_per_step: int
    unrolled_tokens: int
    num_channel_tiles: int
    tokens_per_row: int
    chunks_per_row: int
    is_packed: bool

    @property
    def channels_per_step(self) -> int:
        """Returns the number of channels of a grid step."""
        return self.groups_per_step * CHANNELS_PER_GROUP

    @property
    def has_partial_channel_tile(self) -> bool:
        """Returns whether the last grid step has lanes without channels."""
        return self.channels % self.channels_per_step > 0

    @property
    def has_partial_chunk(self) -> bool:
        """Returns whether the last chunk of a row has positions past the row's last token."""
        return not self.is_packed and self.tokens_per_row % CHUNK_TOKENS > 0


def make_spec(record: SelectiveScan, config: TpuScan, chunks: int) -> ScanSpec:
    """Returns the constants of a record's kernels."""
    _, tokens, channels = record.x.shape
    return ScanSpec(
        state_size=record.decay.shape[1],
        channels=channels,
        groups_per_step=config.block_channels // CHANNELS_PER_GROUP,
        unrolled_tokens=config.unroll,
        num_channel_tiles=cdiv(channels, config.block_channels),
        tokens_per_row=tokens,
        chunks_per_row=chunks,
        is_packed=record.cu_seqlens is not None,
    )


TOKENS_PER_OCTET = 8
"""Tokens in the eight rows of a register."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateSpec:
    """Constants of the kernel that updates states in slots.

    Attributes:
        state_size: E, elements of a channel's state.
        channels_per_step: The number of channels of a grid step: all, or a multiple of 128.
        tokens_per_octet: The number of tokens in a register: 8, or fewer if chunks have fewer.
        octets_per_chunk: The number of octets in a chunk.
        num_channel_tiles: The number of grid steps over channels.
    """

    state_size: int
    channels_per_step: int
    tokens_per_octet: int
    octets_per_chunk: int
    num_channel_tiles: int

    @property
    def chunk_tokens(self) -> int:
        """Returns the number of tokens of a chunk."""
        return self.tokens_per_octet * self.octets_per_chunk


def make_update_spec(record: SelectiveScan, config: TpuScan) -> UpdateSpec:
    """Returns the constants of the kernel for a record whose states are in slots."""
    chunk, channels = tokens_per_update_chunk(record), record.x.shape[2]
    tiles = cdiv(channels, config.block_channels)
    return UpdateSpec(
        state_size=record.decay.shape[1],
        channels_per_step=channels if tiles == 1 else cdiv(cdiv(channels, tiles), LANES) * LANES,
        tokens_per_octet=min(chunk, TOKENS_PER_OCTET),
        octets_per_chunk=max(1, chunk // TOKENS_PER_OCTET),
        num_channel_tiles=tiles,
    )


def tokens_per_update_chunk(record: SelectiveScan) -> int:
    """Returns the number of tokens of a chunk: the mean length of sequences, rounded up to a power of two up to 64."""
    sequences = 1 if record.cu_seqlens is None else record.cu_seqlens.shape[0] - 1
    mean = cdiv(record.x.shape[1], max(1, sequences))
    return min(CHUNK_TOKENS, 1 << (mean - 1).bit_length())
