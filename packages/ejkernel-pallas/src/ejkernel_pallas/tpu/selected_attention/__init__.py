"""Native sparse attention in Mosaic TPU: the selected branch has kernels, and the other branches are tiled attention.

The requirements of the kernels are data in this module, which imports nothing of Pallas.
"""

from collections.abc import Iterable
from typing import Any

from ejkernel.families.selected_attention import FAMILY, blocks_per_query
from ejkernel.ops import ConfigSpace, Implementation
from ejkernel.types.arguments import optional_fields
from ejkernel_pallas.tpu.requirements import make_mosaic_tpu_implementation, tpu_requires
from ejkernel_pallas.tpu.selected_attention import config

MAX_GROUP_SIZE = 64
"""The largest number of query heads per KV head: their rows of a token are one part of a product."""


def _refusal_reasons(record: Any) -> Iterable[str]:
    """Yields the reasons to refuse a record that `Requires` cannot express."""
    group = record.query.shape[2] // record.key.shape[2]
    if not blocks_per_query(record):
        yield "block_indices: got no slots for blocks, the kernels take at least one"
        return
    if group > MAX_GROUP_SIZE:
        yield f"query: got {group} query heads per KV head, the kernels take at most {MAX_GROUP_SIZE}"
        return
    smallest = config.fit_config(record, config.SMALLEST_CONFIG, "backward")
    if (needed := config.work_list_bytes(record, smallest)) > config.MAX_WORK_LIST_SMEM_BYTES:
        yield (
            f"block_indices: got {needed} bytes of SMEM for {smallest.block_q} queries' blocks, the kernels take "
            f"{config.MAX_WORK_LIST_SMEM_BYTES}"
        )
    if (needed := config.vmem_bytes(record, smallest, "backward")) > config.MAX_VMEM_BYTES:
        yield (
            f"query: got {needed} bytes of VMEM for {smallest.block_q} queries and {smallest.block_kv} keys, the "
            f"kernels take {config.MAX_VMEM_BYTES}"
        )


def implementations() -> tuple[Implementation, ...]:
    """Returns the implementation."""
    handles = optional_fields(FAMILY.record).keys() - {"block_indices", "block_tables"}
    requires = tpu_requires(supported_fields=handles, refusal_reasons=_refusal_reasons, head_dims=range(1, 257))
    return (make_mosaic_tpu_implementation(FAMILY, ConfigSpace.of(config, forward=config.TpuSelected), requires),)
