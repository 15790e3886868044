"""The compile-time constants of the kernel that computes a recurrence token by token."""

import dataclasses

from ejkernel.arithmetic import cdiv
from ejkernel.families.linear_recurrence import LinearRecurrence, num_state_heads, slotted_states
from ejkernel_triton.linear_recurrence.decode.config import num_states
from ejkernel_triton.linear_recurrence.steps.config import StepTile
from ejkernel_triton.sizes import pad_to_power_of_two


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepSpec:
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
        NUM_STAGES: Tokens in shared memory or on their way to it, plus one.
        GATE_CHANNELS: Gates per head and token: 0 without gates, 1 or K.
        NUM_GATE_TOKENS: T, or 1 where all tokens have the same gates.
        GATE_TOKEN_STRIDE: Elements between the gates of consecutive tokens.
        HAS_VALUE_DECAY: Whether there are gates of value channels.
        HAS_BETA: Whether there is beta.
        HAS_DT: Whether there is dt.
        HAS_SKIP: Whether there is a skip.
        HAS_LOW_RANK: Whether there is a low-rank term.
        HAS_SEGMENTS: Whether there are segments.
        IS_PACKED: Whether sequences are packed.
        OUTPUT_SCALE: Factor on the output.
        NUM_SLOTS: Number of slots that hold the states of packed sequences; 0 without slots.
        STATE_IS_TRANSPOSED: Whether states are [V, K].
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
    NUM_STAGES: int
    GATE_CHANNELS: int
    NUM_GATE_TOKENS: int
    GATE_TOKEN_STRIDE: int
    HAS_VALUE_DECAY: bool
    HAS_BETA: bool
    HAS_DT: bool
    HAS_SKIP: bool
    HAS_LOW_RANK: bool
    HAS_SEGMENTS: bool
    IS_PACKED: bool
    OUTPUT_SCALE: float
    NUM_SLOTS: int
    STATE_IS_TRANSPOSED: bool


def make_spec(record: LinearRecurrence, config: StepTile) -> StepSpec:
    """Returns the constants of a record's kernel."""
    packed, (_, tokens, query_heads, keys) = record.cu_seqlens is not None, record.query.shape
    value_heads, columns = record.value.shape[2:]
    heads, gates, gate_tokens = num_state_heads(record), 0, 1
    if record.decay is not None:
        gates, gate_tokens = record.decay.shape[3], record.decay.shape[1]
    return StepSpec(
        T=tokens,
        NUM_SEQUENCES=num_states(record) // heads if packed else 1,
        H=heads,
        HQ=query_heads,
        HK=record.key.shape[2],
        HV=value_heads,
        K=keys,
        V=columns,
        BLOCK_K=pad_to_power_of_two(keys),
        BLOCK_V=config.block_v,
        NUM_VALUE_TILES=cdiv(columns, config.block_v),
        NUM_STAGES=config.num_stages,
        GATE_CHANNELS=gates,
        NUM_GATE_TOKENS=gate_tokens,
        GATE_TOKEN_STRIDE=heads * gates if gate_tokens > 1 else 0,
        HAS_VALUE_DECAY=record.value_decay is not None,
        HAS_BETA=record.beta is not None,
        HAS_DT=record.dt is not None,
        HAS_SKIP=record.skip is not None,
        HAS_LOW_RANK=record.low_rank_read is not None,
        HAS_SEGMENTS=record.segment_ids is not None,
        IS_PACKED=packed,
        OUTPUT_SCALE=record.softmax_scale,
        NUM_SLOTS=0 if (held := slotted_states(record)) is None else held.slots.shape[0],
        STATE_IS_TRANSPOSED=record.transposed_states,
    )
