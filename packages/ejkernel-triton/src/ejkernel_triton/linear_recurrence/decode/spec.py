"""The compile-time constants of the decode step's kernel."""

import dataclasses

import jax.numpy as jnp

from ejkernel.arithmetic import cdiv
from ejkernel.families.linear_recurrence import LinearRecurrence, head_count, in_slots
from ejkernel_triton.linear_recurrence.decode.config import DecodeTile, state_count


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeSpec:
    """Constants of the kernel; the letters are those of the record.

    Attributes:
        T: Tokens per row.
        SEQUENCES: Packed sequences per row; 1 without packing.
        H: Heads.
        HQ: Heads of the queries.
        HK: Heads of the keys.
        HV: Heads of the values.
        K: Key channels.
        V: Value channels.
        BLOCK_K: K, padded to a power of two.
        BLOCK_V: Value channels per program.
        TILES: Programs per head's state.
        DECAY: Gates per head and token: 0 without gates, 1 or K.
        DECAY_T: T, or 1 where all tokens have the same gates.
        DECAY_STRIDE: Elements between the gates of consecutive tokens.
        VALUE_DECAY: Whether there are gates of value channels.
        BETA: Whether there is beta.
        DT: Whether there is dt.
        SKIP: Whether there is a skip.
        SEGMENTS: Whether there are segments.
        PACKED: Whether sequences are packed.
        STATE: Whether there are initial states.
        SCALE: Factor on the output.
        EVICTION: The L2 eviction policy of the state: "evict_first", or "" for the default.
        SLOTS: Number of slots that hold the states of packed sequences; 0 without slots.
        TRANSPOSED: Whether states are [V, K].
        IN_PLACE: Whether the final states alias the initial ones, and are read from there.
        TREE: Whether tokens continue the states after their parents, all of which are stored.
    """

    T: int
    SEQUENCES: int
    H: int
    HQ: int
    HK: int
    HV: int
    K: int
    V: int
    BLOCK_K: int
    BLOCK_V: int
    TILES: int
    DECAY: int
    DECAY_T: int
    DECAY_STRIDE: int
    VALUE_DECAY: bool
    BETA: bool
    DT: bool
    SKIP: bool
    SEGMENTS: bool
    PACKED: bool
    STATE: bool
    SCALE: float
    EVICTION: str
    SLOTS: int
    TRANSPOSED: bool
    IN_PLACE: bool
    TREE: bool


def make_spec(record: LinearRecurrence, config: DecodeTile) -> DecodeSpec:
    """Returns the constants of a record's kernel."""
    packed, (_, tokens, query_heads, keys) = record.cu_seqlens is not None, record.query.shape
    value_heads, columns = record.value.shape[2:]
    heads, gates, gate_tokens = head_count(record), 0, 1
    if record.decay is not None:
        gates, gate_tokens = record.decay.shape[3], record.decay.shape[1]
    return DecodeSpec(
        T=tokens,
        SEQUENCES=state_count(record) // heads if packed else 1,
        H=heads,
        HQ=query_heads,
        HK=record.key.shape[2],
        HV=value_heads,
        K=keys,
        V=columns,
        BLOCK_K=1 << (keys - 1).bit_length(),
        BLOCK_V=config.block_v,
        TILES=cdiv(columns, config.block_v),
        DECAY=gates,
        DECAY_T=gate_tokens,
        DECAY_STRIDE=heads * gates if gate_tokens > 1 else 0,
        VALUE_DECAY=record.value_decay is not None,
        BETA=record.beta is not None,
        DT=record.dt is not None,
        SKIP=record.skip is not None,
        SEGMENTS=record.segment_ids is not None,
        PACKED=packed,
        STATE=(record.sequence_state if packed else record.initial_state) is not None,
        SCALE=record.softmax_scale,
        EVICTION="evict_first" if config.streams else "",
        SLOTS=0 if (held := in_slots(record)) is None else held.slots.shape[0],
        TRANSPOSED=record.transposed_states,
        IN_PLACE=_in_place(record),
        TREE=record.parents is not None,
    )


def _in_place(record: LinearRecurrence) -> bool:
    """Returns whether the final states alias the record's states: slots, or states of their dtype. Those of trees do
    not, since they leave the record's as they are.
    """
    if record.parents is not None:
        return False
    given = record.initial_state if record.cu_seqlens is None else record.sequence_state
    return given is not None and (given.dtype == jnp.float32 or in_slots(record) is not None)
