"""The compile-time constants of the decode step's kernel."""

import dataclasses

import jax.numpy as jnp

from ejkernel.arithmetic import cdiv
from ejkernel.families.linear_recurrence import LinearRecurrence, has_token_states, num_state_heads, slotted_states
from ejkernel_triton.linear_recurrence.decode.config import DecodeTile, num_states


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeSpec:
    """Constants of the kernel; the letters are those of the record.

    Attributes:
        T: Tokens per row.
        NUM_SEQUENCES: Packed sequences per row; 1 without packing.
        H: Heads.
        HQ: Heads of the queries.
        HK: Heads of the keys.
        HV: Heads of the values.
        K: Key channels.
        V: Value channels.
        BLOCK_K: K, padded to a power of two.
        BLOCK_V: Value channels per program.
        NUM_VALUE_TILES: Programs per head's state.
        GATE_CHANNELS: Gates per head and token: 0 without gates, 1 or K.
        NUM_GATE_TOKENS: T, or 1 where all tokens have the same gates.
        GATE_TOKEN_STRIDE: Elements between the gates of consecutive tokens.
        HAS_VALUE_DECAY: Whether there are gates of value channels.
        HAS_BETA: Whether there is beta.
        HAS_DT: Whether there is dt.
        HAS_SKIP: Whether there is a skip.
        HAS_SEGMENTS: Whether there are segments.
        IS_PACKED: Whether sequences are packed.
        HAS_INITIAL_STATE: Whether there are initial states.
        OUTPUT_SCALE: Factor on the output.
        STATE_EVICTION_POLICY: The L2 eviction policy of the state: "evict_first", or "" for the default.
        NUM_SLOTS: Number of slots that hold the states of packed sequences; 0 without slots.
        STATE_IS_TRANSPOSED: Whether states are [V, K].
        STATES_ARE_IN_PLACE: Whether the final states alias the initial ones, and are read from there.
        HAS_TREES: Whether tokens continue the states after their parents.
        STORES_TOKEN_STATES: Whether the states after all tokens of trees are stored.
    """

    T: int
    NUM_SEQUENCES: int
    H: int
    HQ: int
    HK: int
    HV: int
    K: int
    V: int
    BLOCK_K: int
    BLOCK_V: int
    NUM_VALUE_TILES: int
    GATE_CHANNELS: int
    NUM_GATE_TOKENS: int
    GATE_TOKEN_STRIDE: int
    HAS_VALUE_DECAY: bool
    HAS_BETA: bool
    HAS_DT: bool
    HAS_SKIP: bool
    HAS_SEGMENTS: bool
    IS_PACKED: bool
    HAS_INITIAL_STATE: bool
    OUTPUT_SCALE: float
    STATE_EVICTION_POLICY: str
    NUM_SLOTS: int
    STATE_IS_TRANSPOSED: bool
    STATES_ARE_IN_PLACE: bool
    HAS_TREES: bool
    STORES_TOKEN_STATES: bool


def make_spec(record: LinearRecurrence, config: DecodeTile) -> DecodeSpec:
    """Returns the constants of a record's kernel."""
    packed, (_, tokens, query_heads, keys) = record.cu_seqlens is not None, record.query.shape
    value_heads, columns = record.value.shape[2:]
    heads, gates, gate_tokens = num_state_heads(record), 0, 1
    if record.decay is not None:
        gates, gate_tokens = record.decay.shape[3], record.decay.shape[1]
    return DecodeSpec(
        T=tokens,
        NUM_SEQUENCES=num_states(record) // heads if packed else 1,
        H=heads,
        HQ=query_heads,
        HK=record.key.shape[2],
        HV=value_heads,
        K=keys,
        V=columns,
        BLOCK_K=1 << (keys - 1).bit_length(),
        BLOCK_V=config.block_v,
        NUM_VALUE_TILES=cdiv(columns, config.block_v),
        GATE_CHANNELS=gates,
        NUM_GATE_TOKENS=gate_tokens,
        GATE_TOKEN_STRIDE=heads * gates if gate_tokens > 1 else 0,
        HAS_VALUE_DECAY=record.value_decay is not None,
        HAS_BETA=record.beta is not None,
        HAS_DT=record.dt is not None,
        HAS_SKIP=record.skip is not None,
        HAS_SEGMENTS=record.segment_ids is not None,
        IS_PACKED=packed,
        HAS_INITIAL_STATE=(record.sequence_state if packed else record.initial_state) is not None,
        OUTPUT_SCALE=record.softmax_scale,
        STATE_EVICTION_POLICY="evict_first" if config.streams_state else "",
        NUM_SLOTS=0 if (slots := slotted_states(record)) is None else slots.slots.shape[0],
        STATE_IS_TRANSPOSED=record.transposed_states,
        STATES_ARE_IN_PLACE=_updates_states_in_place(record),
        HAS_TREES=record.parents is not None,
        STORES_TOKEN_STATES=has_token_states(record),
    )


def _updates_states_in_place(record: LinearRecurrence) -> bool:
    """Returns whether the final states alias the record's states: slots, or states of their dtype. Those of trees do
    not, since they leave the record's as they are.
    """
    if record.parents is not None:
        return False
    state = record.initial_state if record.cu_seqlens is None else record.sequence_state
    return state is not None and (state.dtype == jnp.float32 or slotted_states(record) is not None)
