"""The compile-time constants of the selective-scan kernels."""

import dataclasses

from ejkernel.arithmetic import cdiv
from ejkernel.families.selective_scan import TOKENS_PER_STORED_STATE, SelectiveScan, packed_scan
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
        NUM_CHANNEL_TILES: Programs that share the channels.
        TOKENS_PER_INTERVAL: Tokens between the states that the forward pass stores.
        NUM_INTERVALS: Intervals of the sequence.
        IS_PACKED: Whether the row has packed sequences.
        NUM_SEGMENTS: Segments of the sequence that are scanned in parallel, or packed sequences.
        INTERVALS_PER_SEGMENT: Intervals per segment.
        BLOCK_T: Tokens that are loaded, computed and stored together.
        PREFETCH_STATES: Whether the backward scan loads the states before a block during the computation of the later
            block.
        PREFETCH_TOKEN_BLOCKS: Whether the backward scan loads a block's tokens during the computation of the previous
            block.
        BC_PREFETCH_DISTANCE: Tokens between the load of B and C and their use in the forward scan, and between those of
            B in the recomputation of states; 0 leaves it to the compiler.
    """

    T: int
    E: int
    N: int
    BN: int
    BLOCK_E: int
    NUM_CHANNEL_TILES: int
    TOKENS_PER_INTERVAL: int
    NUM_INTERVALS: int
    IS_PACKED: bool
    NUM_SEGMENTS: int
    INTERVALS_PER_SEGMENT: int
    BLOCK_T: int
    PREFETCH_TOKEN_BLOCKS: bool
    PREFETCH_STATES: bool
    BC_PREFETCH_DISTANCE: int


def make_spec(
    record: SelectiveScan,
    block_e: int,
    block_t: int,
    splits: int,
    *,
    prefetch: bool = True,
    prefetch_states: bool = False,
    bc_prefetch_distance: int = 0,
) -> ScanSpec:
    """Returns the constants of a record's kernels.

    Args:
        record: The canonical arguments.
        block_e: Channels per program.
        block_t: Tokens per block, a divisor of `INTERVAL`.
        splits: Requested segments of the sequence; a segment has whole intervals, so there may be fewer.
        prefetch_states: Whether the backward scan prefetches the states before a block.
        prefetch: Whether the backward scan prefetches a block's tokens.
        bc_prefetch_distance: Tokens between the load of B and C and their use, at most `block_t`; where states are
            recomputed, `block_t`.
    """
    (_, tokens, channels), state_dim = record.x.shape, record.decay.shape[1]
    packed = record.cu_seqlens is not None
    num_intervals = (
        packed_scan.max_num_intervals(tokens, sequences(record)) if packed else cdiv(tokens, TOKENS_PER_STORED_STATE)
    )
    intervals_per_segment = cdiv(num_intervals, max(1, splits))
    return ScanSpec(
        T=tokens,
        E=channels,
        N=state_dim,
        BN=1 << (state_dim - 1).bit_length(),
        BLOCK_E=block_e,
        NUM_CHANNEL_TILES=cdiv(channels, block_e),
        TOKENS_PER_INTERVAL=TOKENS_PER_STORED_STATE,
        NUM_INTERVALS=num_intervals,
        IS_PACKED=packed,
        # Packed sequences are scanned in parallel without a split.
        NUM_SEGMENTS=sequences(record) if packed else cdiv(num_intervals, intervals_per_segment),
        INTERVALS_PER_SEGMENT=intervals_per_segment,
        BLOCK_T=block_t,
        PREFETCH_TOKEN_BLOCKS=prefetch,
        PREFETCH_STATES=prefetch_states,
        BC_PREFETCH_DISTANCE=bc_prefetch_distance,
    )
