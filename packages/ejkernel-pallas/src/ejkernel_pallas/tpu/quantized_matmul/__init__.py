"""Quantized matmul in Mosaic TPU: packed weights are copied to VMEM as stored, and dequantized in registers.

The requirements of the kernels are data in this module, which imports nothing of Pallas.

The requirements and limits of the kernels are data here; nothing of Pallas is imported before a call.
"""

from collections.abc import Iterable
from typing import Any

from ejkernel.families.quantized_matmul import FAMILY
from ejkernel.ops import ConfigSpace, Implementation
from ejkernel_pallas.tpu.quantized_matmul import config
from ejkernel_pallas.tpu.requirements import tpu_requires

BITS = (4, 8)
"""Bits of the codes that the kernels unpack."""


def _reasons(record: Any) -> Iterable[str]:
    """Yields the reasons to refuse a record that `Requires` cannot express."""
    if record.format.bits not in BITS:
        yield f"bits {record.format.bits}: the kernels unpack codes of 4 and 8"


def implementations() -> tuple[Implementation, ...]:
    """Returns the implementation."""
    return (
        Implementation(
            family="quantized_matmul",
            name="mosaic_tpu",
            platform="pallas",
            forward="ejkernel_pallas.tpu.quantized_matmul.forward:forward",
            backward="ejkernel_pallas.tpu.quantized_matmul.backward:backward",
            gradients=frozenset(FAMILY.differentiable),
            requires=tpu_requires(
                handles=frozenset({"zeros", "tensor_scale", "transpose", "precision"}),
                extra=_reasons,
            ),
            config=ConfigSpace(
                forward=config.TpuQuantized,
                backward=config.TpuQuantized,
                public_fields=config.PUBLIC_FIELDS,
                heuristic=config.heuristic,
                candidates=config.candidates,
            ),
            priority=10,
        ),
    )
