"""Native sparse attention in Mosaic TPU: the selected branch has kernels, and the other branches are tiled attention.

The requirements of the kernels are data in this module, which imports nothing of Pallas.
"""

from collections.abc import Iterable
from typing import Any

from ejkernel.families.selected_attention import FAMILY, slots
from ejkernel.ops import ConfigSpace, Implementation
from ejkernel.types.arguments import optional_fields
from ejkernel_pallas.tpu.requirements import mosaic_tpu, tpu_requires
from ejkernel_pallas.tpu.selected_attention import config

MAX_GROUP_SIZE = 64
"""The largest number of query heads per KV head: their rows of a token are one part of a product."""


def _reasons(record: Any) -> Iterable[str]:
    """Yields the reasons to refuse a record that `Requires` cannot express."""
    group = record.query.shape[2] // record.key.shape[2]
    if not slots(record):
        yield "no block is selected"
        return
    if group > MAX_GROUP_SIZE:
        yield f"{group} query heads per KV head are more than {MAX_GROUP_SIZE}"
        return
    smallest = config.fit_config(record, config.SMALLEST_CONFIG)
    if (needed := config.work_list_bytes(record, smallest)) > config.MAX_WORK_LIST_SMEM_BYTES:
        yield (
            f"the list of {smallest.block_q} queries' blocks takes {needed} bytes of SMEM, where kernels have "
            f"{config.MAX_WORK_LIST_SMEM_BYTES}"
        )
    if (needed := config.vmem_bytes(record, smallest)) > config.MAX_VMEM_BYTES:
        yield (
            f"a tile of {smallest.block_q} queries and {smallest.block_kv} keys takes {needed} bytes of VMEM, where "
            f"kernels have {config.MAX_VMEM_BYTES}"
        )


def implementations() -> tuple[Implementation, ...]:
    """Returns the implementation."""
    handles = optional_fields(FAMILY.record).keys() - {"block_indices"}
    requires = tpu_requires(handles=handles, extra=_reasons, head_dims=range(1, 257))
    return (mosaic_tpu(FAMILY, ConfigSpace.of(config, forward=config.TpuSelected), requires),)
