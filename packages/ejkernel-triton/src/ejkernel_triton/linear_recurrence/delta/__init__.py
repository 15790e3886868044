"""Chunked linear recurrences with the delta rule, in both passes."""

from collections.abc import Iterable
from typing import Any

from ejkernel.ops import ConfigSpace, Implementation
from ejkernel_triton.linear_recurrence import chunked
from ejkernel_triton.linear_recurrence.chunked.config import PUBLIC_FIELDS, tuned_table_key
from ejkernel_triton.linear_recurrence.delta import config
from ejkernel_triton.requirements import triton_implementation, triton_requires

HANDLED_FIELDS = (chunked.HANDLED_FIELDS - {"dt", "skip", "precision", "transposed_states"}) | {"beta"}
"""Optional fields that the delta rule's kernels honour."""

DIFFERENTIABLE_FIELDS = (chunked.DIFFERENTIABLE_FIELDS - {"dt", "skip"}) | {"beta"}


def _refusal_reasons(record: Any) -> Iterable[str]:
    """Yields the reasons to refuse a record that `Requires` cannot express."""
    if record.beta is None:
        yield "beta: got None; the implementation 'triton' serves recurrences without the delta rule"


def implementations() -> tuple[Implementation, ...]:
    """Returns recurrences with the delta rule."""
    return (
        triton_implementation(
            "linear_recurrence",
            name="triton_delta",
            forward="linear_recurrence.delta.forward:forward",
            backward="linear_recurrence.delta.backward:backward",
            gradients=DIFFERENTIABLE_FIELDS,
            paired=True,
            requires=triton_requires(head_dims=range(1, 257), handles=HANDLED_FIELDS, extra_reasons=_refusal_reasons),
            config=ConfigSpace(
                forward=config.DeltaRuleConfig,
                public_fields=PUBLIC_FIELDS,
                heuristic=config.heuristic,
                candidates=config.candidates,
                kind=tuned_table_key,
            ),
        ),
    )
