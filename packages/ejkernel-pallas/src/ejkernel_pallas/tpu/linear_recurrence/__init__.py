"""The linear recurrence in Mosaic TPU: chunks as products of the matrix unit, states in VMEM across the grid.

What the kernels need, and what they do not do, is data here; nothing of Pallas is imported before a call.
"""

from ejkernel.families.linear_recurrence import FAMILY
from ejkernel.ops import ConfigSpace, Implementation
from ejkernel.types.arguments import optional_fields
from ejkernel_pallas.tpu.linear_recurrence import config
from ejkernel_pallas.tpu.requirements import tpu_requires


def implementations() -> tuple[Implementation, ...]:
    """Returns one implementation."""
    return (
        Implementation(
            family="linear_recurrence",
            name="mosaic_tpu",
            platform="pallas",
            forward="ejkernel_pallas.tpu.linear_recurrence.forward:forward",
            backward="ejkernel_pallas.tpu.linear_recurrence.backward:backward",
            gradients=frozenset(FAMILY.differentiable),
            requires=tpu_requires(handles=optional_fields(FAMILY.record)),
            config=ConfigSpace(
                forward=config.TpuRecurrence,
                backward=config.TpuRecurrence,
                public_fields=config.PUBLIC_FIELDS,
                heuristic=config.heuristic,
                candidates=config.candidates,
            ),
            priority=10,
        ),
    )
