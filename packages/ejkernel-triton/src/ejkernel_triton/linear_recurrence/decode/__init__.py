"""The decode step of linear recurrences: one to eight tokens of each sequence, the states updated in place."""

from collections.abc import Iterable
from typing import Any

from ejkernel.ops import ConfigSpace, Implementation
from ejkernel.planning.decode_lengths import length_refusals
from ejkernel_triton.linear_recurrence import chunked
from ejkernel_triton.linear_recurrence.decode import config
from ejkernel_triton.requirements import triton_implementation, triton_requires

HANDLED_FIELDS = chunked.HANDLED_FIELDS | {
    "beta",
    "value_decay",
    "segment_ids",
    "parents",
    "keeps_token_states",
}
"""Optional fields that the decode step honours: all of them."""


def _refusal_reasons(record: Any) -> Iterable[str]:
    """Yields the reasons to refuse a record that `Requires` cannot express."""
    if record.parents is None:  # no other kernel has trees, of any size
        yield from length_refusals("query", record.query.shape[1], record.cu_seqlens)


def implementations() -> tuple[Implementation, ...]:
    """Returns the decode step, with a priority above the chunked kernels, which pad to a chunk; it refuses longer
    calls.
    """
    return (
        triton_implementation(
            "linear_recurrence",
            name="triton_decode",
            forward="linear_recurrence.decode.forward:forward",
            requires=triton_requires(head_dims=range(1, 257), handles=HANDLED_FIELDS, extra_reasons=_refusal_reasons),
            config=ConfigSpace.of(config, forward=config.DecodeTile),
            priority=20,
            cases="ejkernel_triton.linear_recurrence.decode.cases:cases",
        ),
    )
