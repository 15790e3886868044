"""Quantized matmul in Mosaic TPU: packed weights are copied to VMEM as stored, and dequantized in registers.

The requirements of the kernels are data in this module, which imports nothing of Pallas.
"""

from collections.abc import Iterable
from typing import Any

from ejkernel.families.quantized_matmul import FAMILY
from ejkernel.ops import ConfigSpace, Implementation
from ejkernel_pallas.tpu.quantized_matmul import config
from ejkernel_pallas.tpu.requirements import make_mosaic_tpu_implementation, tpu_requires

SUPPORTED_CODE_BITS = (4, 8)
"""Bits of the codes that the kernels unpack."""


def _refusal_reasons(record: Any) -> Iterable[str]:
    """Yields the reasons to refuse a record that `Requires` cannot express."""
    if record.format.bits not in SUPPORTED_CODE_BITS:
        yield f"bits: got {record.format.bits}, the kernels take codes of 4 and 8"


def implementations() -> tuple[Implementation, ...]:
    """Returns the implementation."""
    requires = tpu_requires(
        supported_fields=frozenset({"zeros", "tensor_scale", "transpose", "precision"}),
        refusal_reasons=_refusal_reasons,
    )
    space = ConfigSpace.of(config, forward=config.TpuQuantized, fixed_if_invariant=("block_m", "batch_invariant"))
    return (make_mosaic_tpu_implementation(FAMILY, space, requires, invariant_to=frozenset({"batch"})),)
