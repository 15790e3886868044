"""The linear recurrence in Mosaic TPU: chunks are products of the matrix unit, and states stay in VMEM across the
grid.

The requirements of the kernels are data in this module, which imports nothing of Pallas.
"""

from ejkernel.families.linear_recurrence import FAMILY
from ejkernel.ops import ConfigSpace, Implementation
from ejkernel.types.arguments import optional_fields
from ejkernel_pallas.tpu.linear_recurrence import config
from ejkernel_pallas.tpu.requirements import tpu_requires


def implementations() -> tuple[Implementation, ...]:
    """Returns the implementation."""
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
