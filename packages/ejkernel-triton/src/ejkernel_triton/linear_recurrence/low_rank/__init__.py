"""Recurrences whose transitions are diagonal plus low rank, as in RWKV-7, in both passes."""

from collections.abc import Iterable
from typing import Any

from ejkernel.ops import ConfigSpace, Implementation
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.params import Direction
from ejkernel_triton.linear_recurrence import chunked
from ejkernel_triton.linear_recurrence.low_rank import config
from ejkernel_triton.requirements import triton_implementation, triton_requires

MAX_HEAD_DIM = 64
"""Largest head dimension: a program has all channels of a chunk's vectors, and a chunk's transition has K x K elements.
RWKV-7's heads have 64 channels."""

VECTOR_FIELDS = frozenset({"low_rank_write", "low_rank_read"})
"""The vectors of the low-rank term."""

HANDLED_FIELDS = (chunked.HANDLED_FIELDS - {"dt", "skip", "precision", "transposed_states"}) | VECTOR_FIELDS
"""Optional fields that the kernels honour."""

DIFFERENTIABLE_FIELDS = (chunked.DIFFERENTIABLE_FIELDS - {"dt", "skip"}) | VECTOR_FIELDS


def _refusal_reasons(record: Any) -> Iterable[str]:
    """Yields the reasons to refuse a record that `Requires` cannot express."""
    if record.low_rank_write is None or record.low_rank_read is None:
        yield "low_rank_read: got None; the implementations 'triton' and 'triton_delta' serve recurrences without it"
    key_dim = record.query.shape[3]
    if record.decay is None or record.decay.shape[3] != key_dim:
        got = "None" if record.decay is None else f"{record.decay.shape[3]} per head"
        yield f"decay: got {got}, wants a gate per key channel, {key_dim} per head"


def _priority(record: Any, device: DeviceInfo, direction: Direction) -> int:
    """Returns the priority: below that of XLA, 0, for calls with one token per row or sequence.

    A chunk's transition is as large as two states, so a step of one token would move 2.5 times the bytes of reading and
    writing the states. XLA does not pad one token to a chunk.
    """
    num_sequences = record.query.shape[0] if record.cu_seqlens is None else record.cu_seqlens.shape[0] - 1
    num_tokens = record.query.shape[0] * record.query.shape[1]
    return -1 if num_tokens <= num_sequences else 10


def implementations() -> tuple[Implementation, ...]:
    """Returns recurrences with a low-rank term."""
    return (
        triton_implementation(
            "linear_recurrence",
            name="triton_low_rank",
            forward="linear_recurrence.low_rank.forward:forward",
            backward="linear_recurrence.low_rank.backward:backward",
            gradients=DIFFERENTIABLE_FIELDS,
            paired=True,
            priority=_priority,
            requires=triton_requires(
                head_dims=range(1, MAX_HEAD_DIM + 1), handles=HANDLED_FIELDS, extra_reasons=_refusal_reasons
            ),
            config=ConfigSpace.of(config, forward=config.LowRankConfig),
        ),
    )
