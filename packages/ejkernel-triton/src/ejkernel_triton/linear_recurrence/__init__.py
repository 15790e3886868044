"""Chunked linear recurrences in Triton, for GPUs from Ampere on and AMD's through HIP."""

from collections.abc import Iterable
from typing import Any

from ejkernel.families.linear_recurrence import plain_states as recurrent_states
from ejkernel.ops import ConfigSpace, Implementation
from ejkernel_triton.linear_recurrence import config, decode_config
from ejkernel_triton.requirements import triton_implementation, triton_requires

HANDLES = recurrent_states.HANDLES | {
    *("decay", "dt", "skip", "initial_state", "cu_seqlens", "sequence_state", "precision")
}
"""Optional fields that the kernels honour, those of states with the states moved around the kernels."""

DELTA_HANDLES = (HANDLES - {"dt", "skip", "precision", "transposed_states"}) | {"beta"}
"""Optional fields that the delta rule's kernels honour."""

DECODE_HANDLES = HANDLES | {"beta", "value_decay", "segment_ids"}
"""Optional fields that the decode step honours: all that there are."""

GRADIENTS = frozenset({"query", "key", "value", "decay", "dt", "skip", "initial_state", "sequence_state"})
DELTA_GRADIENTS = (GRADIENTS - {"dt", "skip"}) | {"beta"}


def _reasons(record: Any) -> Iterable[str]:
    """What `Requires` has no word for."""
    if not all(x.size for x in (record.query, record.key, record.value)):
        yield "an array is empty"


def _delta_reasons(record: Any) -> Iterable[str]:
    if record.beta is None:
        yield "beta is not given: that is served by 'triton'"
    yield from _reasons(record)


STEP = 8
"""Most tokens a sequence of the decode step; of packed sequences, on average."""

LONGEST = 256
"""Most tokens of packed sequences beyond one each: one of them may have all, and they are worked on in order."""


def _decode_reasons(record: Any) -> Iterable[str]:
    tokens, sequences = record.query.shape[1], 1
    if record.cu_seqlens is not None:
        sequences = record.cu_seqlens.shape[0] - 1
    if tokens > STEP * sequences:
        several = f" of {sequences} packed sequences" if record.cu_seqlens is not None else ""
        yield f"query: {tokens} tokens{several} are more than a step of {STEP} tokens a sequence has"
    if record.cu_seqlens is not None and tokens - sequences > LONGEST:
        longest = f"one of {sequences} packed sequences may have {tokens - sequences + 1}"
        yield f"query: {longest} of {tokens} tokens, which a step works on one after the other"
    yield from _reasons(record)


def implementations() -> tuple[Implementation, ...]:
    """Recurrences and the delta rule, in both passes; for the CPU too where Triton interprets."""
    return (
        triton_implementation(
            "linear_recurrence",
            forward="linear_recurrence.forward:forward",
            backward="linear_recurrence.backward:backward",
            gradients=GRADIENTS,
            paired=True,
            requires=triton_requires(head_dims=range(1, 257), handles=HANDLES, extra=_reasons),
            config=ConfigSpace(
                forward=config.RecurrencePasses,
                faces=config.FACES,
                heuristic=config.heuristic,
                candidates=config.candidates,
                kind=config.kind_of_large,
            ),
        ),
        triton_implementation(
            "linear_recurrence",
            name="triton_delta",
            forward="linear_recurrence.delta:forward",
            backward="linear_recurrence.delta:backward",
            gradients=DELTA_GRADIENTS,
            paired=True,
            requires=triton_requires(head_dims=range(1, 257), handles=DELTA_HANDLES, extra=_delta_reasons),
            config=ConfigSpace(
                forward=config.DeltaPasses,
                faces=config.FACES,
                heuristic=config.delta_heuristic,
                candidates=config.delta_candidates,
                kind=config.kind_of_large,
            ),
        ),
        # Before the chunked kernels, which pad a step to a chunk: it refuses what is longer.
        triton_implementation(
            "linear_recurrence",
            name="triton_decode",
            forward="linear_recurrence.decode:forward",
            requires=triton_requires(head_dims=range(1, 257), handles=DECODE_HANDLES, extra=_decode_reasons),
            config=ConfigSpace(
                forward=decode_config.DecodeTile,
                faces=decode_config.FACES,
                heuristic=decode_config.heuristic,
                candidates=decode_config.candidates,
            ),
            priority=20,
            cases="ejkernel_triton.linear_recurrence.decode_cases:step_cases",
        ),
    )
