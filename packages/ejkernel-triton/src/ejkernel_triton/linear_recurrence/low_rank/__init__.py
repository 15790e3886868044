"""Recurrences whose transitions are diagonal plus low rank, as in RWKV-7, in both passes."""

from collections.abc import Iterable
from typing import Any

from ejkernel.ops import ConfigSpace, Implementation
from ejkernel_triton.linear_recurrence import chunked
from ejkernel_triton.linear_recurrence.low_rank import config
from ejkernel_triton.requirements import triton_implementation, triton_requires

MAX_HEAD_DIM = 64
"""Largest head dimension: a program has all channels of a chunk's vectors, and a chunk's transition has K x K elements.
RWKV-7's heads have 64 channels."""

HANDLED_FIELDS = (chunked.HANDLED_FIELDS - {"dt", "skip", "precision"}) | {"low_rank_write", "low_rank_read"}
"""Optional fields that the kernels honour."""

DIFFERENTIABLE_FIELDS = (chunked.DIFFERENTIABLE_FIELDS - {"dt", "skip"}) | {"low_rank_write", "low_rank_read"}


def _refusal_reasons(record: Any) -> Iterable[str]:
    """Yields the reasons to refuse a record that `Requires` cannot express."""
    if record.low_rank_write is None or record.low_rank_read is None:
        yield "low_rank_read: got None; the implementations 'triton' and 'triton_delta' serve recurrences without it"
    key_dim = record.query.shape[3]
    if record.decay is None or record.decay.shape[3] != key_dim:
        got = "None" if record.decay is None else f"{record.decay.shape[3]} per head"
        yield f"decay: got {got}, wants a gate per key channel, {key_dim} per head"


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
            requires=triton_requires(
                head_dims=range(1, MAX_HEAD_DIM + 1), handles=HANDLED_FIELDS, extra_reasons=_refusal_reasons
            ),
            config=ConfigSpace.of(config, forward=config.LowRankConfig),
        ),
    )
