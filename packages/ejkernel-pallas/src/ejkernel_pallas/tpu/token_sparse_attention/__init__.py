"""Token-sparse attention in Mosaic TPU: whole tiles of keys, each key counted as often as a query lists it.

The requirements and limits of the kernel are data in this module, so Pallas is not imported before a call.
"""

from collections.abc import Iterable

from ejkernel.arithmetic import cdiv
from ejkernel.families.token_sparse_attention import FAMILY, TokenSparseAttention
from ejkernel.ops import ConfigSpace, Implementation
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.params import Direction
from ejkernel_pallas.tpu.requirements import MAX_VMEM_BYTES, make_mosaic_tpu_implementation, tpu_requires
from ejkernel_pallas.tpu.token_sparse_attention import config

HEAD_DIMS = range(1, 1025)
"""The rows of keys that tiles hold."""
MAX_QUERY_TILES = 2**16
"""The most tiles of queries: the tiles of keys that they list are in scalar memory."""
MIN_QUERIES = 32
"""The fewest queries that fill a tile."""
MAX_KEYS_OF_A_LISTED_KEY = 768
"""How many keys, times the query heads of a KV head, take the kernel as long as a listed key takes XLA's program.

The estimates and the rule are in docs/lab/tpu_kernels.md.
"""


def _priority(record: TokenSparseAttention, device: DeviceInfo, direction: Direction) -> int:
    """Returns the place in the order of choice: after XLA's, which gathers, for few queries and short lists."""
    group, listed = record.query.shape[2] // record.key.shape[2], record.indices.shape[3]
    has_long_lists = record.key.shape[1] * group <= MAX_KEYS_OF_A_LISTED_KEY * listed
    return 10 if has_long_lists and record.query.shape[1] >= MIN_QUERIES else -10


def memory_refusal_reasons(record: TokenSparseAttention, block_q: int, vmem_bytes: int) -> Iterable[str]:
    """Yields the reasons to refuse a record that does not fit VMEM or scalar memory.

    Args:
        record: The canonical arguments.
        block_q: Queries of the smallest tile.
        vmem_bytes: Bytes of VMEM that the smallest configuration takes.
    """
    batch, tokens = record.query.shape[:2]
    if (tiles := batch * cdiv(tokens, block_q)) > MAX_QUERY_TILES:
        yield f"query: got {tiles} tiles of {block_q} queries, the kernel takes at most {MAX_QUERY_TILES}"
    if vmem_bytes > MAX_VMEM_BYTES:
        yield (
            f"key: got {vmem_bytes} bytes of VMEM for {block_q} queries and lists of {record.indices.shape[3]} of "
            f"{record.key.shape[1]} keys, the kernel takes {MAX_VMEM_BYTES}"
        )


def _refusal_reasons(record: TokenSparseAttention) -> Iterable[str]:
    """Yields the reasons to refuse a record that `Requires` cannot express."""
    smallest = config.SMALLEST_CONFIG
    yield from memory_refusal_reasons(record, smallest.block_q, config.vmem_bytes(record, smallest))


def implementations() -> tuple[Implementation, ...]:
    """Returns the implementation of this family; its gradients are XLA's."""
    requires = tpu_requires(
        supported_fields={"value", "softmax_aux"},
        refusal_reasons=_refusal_reasons,
        head_dims=HEAD_DIMS,
    )
    space = ConfigSpace.of(config, forward=config.TpuTokenSparse)
    return (make_mosaic_tpu_implementation(FAMILY, space, requires, backward=False, priority=_priority),)
