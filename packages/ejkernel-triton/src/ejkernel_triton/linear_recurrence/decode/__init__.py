"""The decode step of linear recurrences: one to eight tokens of each sequence, the states updated in place."""

from collections.abc import Iterable
from typing import Any

from ejkernel.ops import ConfigSpace, Implementation
from ejkernel_triton.linear_recurrence import chunked
from ejkernel_triton.linear_recurrence.decode import config
from ejkernel_triton.requirements import triton_implementation, triton_requires

HANDLES = chunked.HANDLES | {"beta", "value_decay", "segment_ids", "parents"}
"""Optional fields that the decode step honours: all of them."""

MAX_TOKENS_PER_SEQUENCE = 8
"""The largest number of tokens per sequence; for packed sequences, on average."""

MAX_EXTRA_TOKENS = 256
"""The largest number of tokens of packed sequences beyond one each: a single sequence may have them all, one after
another.
"""


def _refusal_reasons(record: Any) -> Iterable[str]:
    """Yields the reasons to refuse a record that `Requires` cannot express."""
    tokens, sequences = record.query.shape[1], 1
    if record.parents is not None:  # no other kernel has trees, of any size
        return
    if record.cu_seqlens is not None:
        sequences = record.cu_seqlens.shape[0] - 1
    if tokens > MAX_TOKENS_PER_SEQUENCE * sequences:
        limit = f"the decode step supports at most {MAX_TOKENS_PER_SEQUENCE} tokens per sequence"
        yield f"query: {tokens} tokens of {sequences} sequences; {limit}"
    if record.cu_seqlens is not None and tokens - sequences > MAX_EXTRA_TOKENS:
        longest = f"one of {sequences} packed sequences may have {tokens - sequences + 1}"
        yield f"query: {longest} of {tokens} tokens, which the decode step processes one after another"


def implementations() -> tuple[Implementation, ...]:
    """Returns the decode step, with a priority above the chunked kernels, which pad to a chunk; it refuses longer
    calls.
    """
    return (
        triton_implementation(
            "linear_recurrence",
            name="triton_decode",
            forward="linear_recurrence.decode.forward:forward",
            requires=triton_requires(head_dims=range(1, 257), handles=HANDLES, extra=_refusal_reasons),
            config=ConfigSpace.of(config, forward=config.DecodeTile),
            priority=20,
            cases="ejkernel_triton.linear_recurrence.decode.cases:cases",
        ),
    )
