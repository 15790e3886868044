"""The linear recurrence in Mosaic TPU: chunks as products of the matrix unit, states in VMEM across the grid.

What the kernels need, and what they do not do, is data here; nothing of Pallas is imported before a call.
"""

from collections.abc import Iterable
from typing import Any

from ejkernel.families.linear_recurrence import FAMILY
from ejkernel.ops import ConfigSpace, Implementation
from ejkernel.types.arguments import optional_fields
from ejkernel_pallas.tpu.linear_recurrence import config
from ejkernel_pallas.tpu.requirements import tpu_requires


def _reasons(record: Any) -> Iterable[str]:
    """Yields the reasons to refuse a record that `Requires` cannot express."""
    if not (record.query.size and record.value.size):
        yield "an array is empty"


def implementations() -> tuple[Implementation, ...]:
    """Returns one implementation."""
    return (
        Implementation(
            family="linear_recurrence",
            name="pallas_tpu",
            platform="pallas",
            forward="ejkernel_pallas.tpu.linear_recurrence.forward:forward",
            backward="ejkernel_pallas.tpu.linear_recurrence.backward:backward",
            gradients=frozenset(FAMILY.differentiable),
            requires=tpu_requires(handles=optional_fields(FAMILY.record), extra=_reasons),
            config=ConfigSpace(
                forward=config.TpuRecurrence,
                backward=config.TpuRecurrence,
                faces=config.PUBLIC_FIELDS,
                heuristic=config.heuristic,
                candidates=config.candidates,
            ),
            priority=10,
        ),
    )
