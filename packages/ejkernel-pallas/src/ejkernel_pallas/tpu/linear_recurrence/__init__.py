"""The linear recurrence in Mosaic TPU: chunks are products of the matrix unit, and states stay in VMEM across the
grid.

The requirements of the kernels are data in this module, which imports nothing of Pallas.
"""

from collections.abc import Iterable
from typing import Any

from ejkernel.families.linear_recurrence import FAMILY
from ejkernel.ops import ConfigSpace, Implementation
from ejkernel.types.arguments import optional_fields
from ejkernel_pallas.tpu.linear_recurrence import config
from ejkernel_pallas.tpu.requirements import make_mosaic_tpu_implementation, tpu_requires

UNSUPPORTED_FIELDS = frozenset({"parents", "keeps_token_states"})
"""The fields of trees of draft tokens, which the kernels do not have."""


def _refusal_reasons(record: Any) -> Iterable[str]:
    """Yields the reasons to refuse a record that `Requires` cannot express."""
    if (needed := config.state_vmem_bytes_per_head(record)) > config.MAX_STATES_VMEM_BYTES:
        sizes = f"{record.query.shape[3]} x {record.value.shape[3]}"
        yield f"query: got states of {sizes}, {needed} bytes of VMEM, the kernels take {config.MAX_STATES_VMEM_BYTES}"
    if (needed := config.chunk_table_smem_bytes(record)) > config.MAX_CHUNK_TABLE_SMEM_BYTES:
        limit = config.MAX_CHUNK_TABLE_SMEM_BYTES
        yield f"query: got a table of chunks of {needed} bytes of SMEM, the kernels take {limit}"


def implementations() -> tuple[Implementation, ...]:
    """Returns the implementation."""
    handles = optional_fields(FAMILY.record).keys() - UNSUPPORTED_FIELDS
    requires = tpu_requires(supported_fields=handles, refusal_reasons=_refusal_reasons)
    space = ConfigSpace.of(config, forward=config.TpuRecurrence)
    return (make_mosaic_tpu_implementation(FAMILY, space, requires, fields_without_gradient=UNSUPPORTED_FIELDS),)
