"""The lightning indexer in Mosaic TPU: scores of a block of queries exist in VMEM alone, where they are selected from.

The requirements and limits of the kernel are data in this module, so Pallas is not imported before a call.
"""

from collections.abc import Iterable

from ejkernel.families.lightning_indexer import FAMILY, LightningIndexer
from ejkernel.ops import ConfigSpace, Implementation
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.params import Direction
from ejkernel_pallas.tpu.lightning_indexer import config
from ejkernel_pallas.tpu.requirements import (
    SUPPORTED_DTYPES_AND_FLOAT8,
    make_mosaic_tpu_implementation,
    tpu_requires,
)

HANDLES = frozenset({"key_scales", "rectify"})
HEAD_DIMS = range(1, 257)
"""The channels of queries and keys."""
MAX_HEADS = 256
"""The most heads: all heads of a block, or all products of a query with some keys, are in VMEM."""
MAX_TOP_K = 4096
"""The most keys that are sorted in VMEM."""
MAX_QUERIES_OF_XLA = 8
"""The most queries per batch row that XLA's program selects for in less time."""
MAX_QUERIES = 2**22
"""The most queries of a call: the tiles of keys of their blocks are in scalar memory."""


def _priority(record: LightningIndexer, device: DeviceInfo, direction: Direction) -> int:
    """Returns the place in the order of choice: after XLA's for few queries, as a block always has 128.

    On v5e, the estimate of a block that selects 2048 of 32768 keys is 0.70 ms, and that of XLA's program is 0.35 ms for
    one query and 0.48 ms for two to eight, without its sorts (docs/lab/tpu_kernels.md). `mosaic_tpu_decode` comes
    before this one, and mostly before XLA's.
    """
    return -10 if record.query.shape[1] <= MAX_QUERIES_OF_XLA else 10


def _refusal_reasons(record: LightningIndexer) -> Iterable[str]:
    """Yields the reasons to refuse a record that `Requires` cannot express."""
    (batch, tokens, heads, channels), keys = record.query.shape, record.key.shape[1]
    if heads > MAX_HEADS:
        yield f"query: got {heads} heads, the kernel takes at most {MAX_HEADS}"
        return
    if batch * tokens > MAX_QUERIES:
        yield f"query: got {batch * tokens} queries, the kernel takes at most {MAX_QUERIES}"
    if record.top_k > MAX_TOP_K:
        yield f"top_k: got {record.top_k}, the kernel selects at most {MAX_TOP_K}"
        return
    smallest = config.SMALLEST_CONFIG
    if keys and config.max_keys_per_selection(record) < smallest.keys_per_selection:
        yield f"key: got {keys} keys with top_k={record.top_k}, the kernel packs key and row into 31 bits"
    elif (needed := config.vmem_bytes(record, smallest.block_k, smallest.keys_per_selection)) > config.MAX_VMEM_BYTES:
        yield (
            f"query: got {needed} bytes of VMEM for {heads} heads of {channels} channels, the kernel takes "
            f"{config.MAX_VMEM_BYTES}"
        )


def implementations() -> tuple[Implementation, ...]:
    """Returns the implementation of this family; its gradients are XLA's."""
    return (
        make_mosaic_tpu_implementation(
            FAMILY,
            ConfigSpace.of(config, forward=config.TpuIndexerTiles),
            tpu_requires(
                supported_fields=HANDLES,
                refusal_reasons=_refusal_reasons,
                head_dims=HEAD_DIMS,
                dtypes=SUPPORTED_DTYPES_AND_FLOAT8,
            ),
            backward=False,
            cases="ejkernel_pallas.tpu.lightning_indexer.cases:cases",
            priority=_priority,
            invariant_to=frozenset({"batch", "padding", "chunking"}),
            invariant_priority=10,
        ),
    )
