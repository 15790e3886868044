"""The compile-time constants of the decode step's kernel."""

import dataclasses

import jax.numpy as jnp

from ejkernel.arithmetic import cdiv
from ejkernel.families.selective_scan import SelectiveScan
from ejkernel_triton.selective_scan.decode.config import ScanDecodeTile, num_sequences
from ejkernel_triton.sizes import pad_to_power_of_two


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScanDecodeSpec:
    """Constants of the kernel.

    Attributes:
        T: Tokens per row.
        NUM_SEQUENCES: Packed sequences per row; 1 without packing.
        E: Channels.
        N: State dimension.
        BLOCK_E: Channels per program.
        BLOCK_N: N, padded to a power of two.
        NUM_CHANNEL_TILES: Programs per sequence.
        IS_PACKED: Whether sequences are packed.
        HAS_INITIAL_STATE: Whether there are initial states.
        NUM_SLOTS: Number of slots that hold them; 0 without slots.
        STATES_ARE_IN_PLACE: Whether the final states alias the initial ones, and are read from there.
    """

    T: int
    NUM_SEQUENCES: int
    E: int
    N: int
    BLOCK_E: int
    BLOCK_N: int
    NUM_CHANNEL_TILES: int
    IS_PACKED: bool
    HAS_INITIAL_STATE: bool
    NUM_SLOTS: int
    STATES_ARE_IN_PLACE: bool


def make_spec(record: SelectiveScan, config: ScanDecodeTile) -> ScanDecodeSpec:
    """Returns the constants of a record's kernel."""
    (_, tokens, channels), size, states = record.x.shape, record.decay.shape[1], record.initial_state
    packed = record.cu_seqlens is not None
    slots = 0 if states is None or record.state_slots is None else states.shape[0]
    return ScanDecodeSpec(
        T=tokens,
        NUM_SEQUENCES=num_sequences(record) if packed else 1,
        E=channels,
        N=size,
        BLOCK_E=config.block_e,
        BLOCK_N=pad_to_power_of_two(size),
        NUM_CHANNEL_TILES=cdiv(channels, config.block_e),
        IS_PACKED=packed,
        HAS_INITIAL_STATE=states is not None,
        NUM_SLOTS=slots,
        STATES_ARE_IN_PLACE=states is not None and (slots > 0 or states.dtype == jnp.float32),
    )
