"""The compile-time constants of the selective-scan kernels."""

import dataclasses

from ejkernel.arithmetic import cdiv
from ejkernel.families.selective_scan import INTERVAL, SelectiveScan, packed_scan
from ejkernel.families.selective_scan.scan_sequences import sequences


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScanSpec:
    """Constants of the kernels.

    Attributes:
        T: Tokens.
        E: Channels.
        N: Elements of a channel's state.
        BN: N, padded to a power of two.
        BLOCK_E: Channels per program.
        TILES: Programs that share the channels.
        INTERVAL: Tokens between the states that the forward pass stores.
        CHUNKS: Intervals of the sequence.
        PACKED: Whether the row has packed sequences.
        SPLITS: Segments of the sequence that are scanned in parallel, or packed sequences.
        PART: Intervals per segment.
        BLOCK_T: Tokens that are loaded, computed and stored together.
        PREFETCH_STATES: Whether the backward scan loads the states before a block during the computation of the later
            block.
        PREFETCH: Whether the backward scan loads a block's tokens during the computation of the previous block.
        PREFETCHED_COLUMNS: Tokens between the load of B and C and their use in the forward scan, and between those of B
            in the recomputation of states; 0 leaves it to the compiler.
    """

    T: int
    E: int
    N: int
    BN: int
    BLOCK_E: int
    TILES: int
    INTERVAL: int
    CHUNKS: int
    PACKED: bool
    SPLITS: int
    PART: int
    BLOCK_T: int
    PREFETCH: bool
    PREFETCH_STATES: bool
    PREFETCHED_COLUMNS: int


def make_spec(
    record: SelectiveScan,
    block_e: int,
    block_t: int,
    splits: int,
    *,
    prefetch: bool = True,
    prefetch_states: bool = False,
    prefetched_columns: int = 0,
) -> ScanSpec:
    """Returns the constants of a record's kernels.

    Args:
        record: The canonical arguments.
        block_e: Channels per program.
        block_t: Tokens per block, a divisor of `INTERVAL`.
        splits: Requested segments of the sequence; a segment has whole intervals, so there may be fewer.
        prefetch_states: Whether the backward scan prefetches the states before a block.
        prefetch: Whether the backward scan prefetches a block's tokens.
        prefetched_columns: Tokens between the load of B and C and their use, at most `block_t`; where states are
            recomputed, `block_t`.
    """
    (_, tokens, channels), size = record.x.shape, record.decay.shape[1]
    packed = record.cu_seqlens is not None
    chunks = packed_scan.interval_count(tokens, sequences(record)) if packed else cdiv(tokens, INTERVAL)
    part = cdiv(chunks, max(1, splits))
    return ScanSpec(
        T=tokens,
        E=channels,
        N=size,
        BN=1 << (size - 1).bit_length(),
        BLOCK_E=block_e,
        TILES=cdiv(channels, block_e),
        INTERVAL=INTERVAL,
        CHUNKS=chunks,
        PACKED=packed,
        # Packed sequences are scanned in parallel without a split.
        SPLITS=sequences(record) if packed else cdiv(chunks, part),
        PART=part,
        BLOCK_T=block_t,
        PREFETCH=prefetch,
        PREFETCH_STATES=prefetch_states,
        PREFETCHED_COLUMNS=prefetched_columns,
    )
