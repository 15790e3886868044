"""The decode step of native sparse attention in Mosaic TPU: lists of blocks of a cache, dense or in pages.

The requirements and limits of the kernel are data in this module, so Pallas is not imported before a call.
"""

from collections.abc import Iterable

from ejkernel.arithmetic import cdiv
from ejkernel.families.selected_attention import FAMILY, SelectedAttention, blocks_per_query, num_keys
from ejkernel.ops import ConfigSpace, Implementation
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.params import Direction
from ejkernel.types.arguments import optional_fields
from ejkernel_pallas.tpu.mosaic.vectors import LANES
from ejkernel_pallas.tpu.requirements import MAX_VMEM_BYTES, make_mosaic_tpu_implementation, tpu_requires
from ejkernel_pallas.tpu.selected_attention_decode import config

MAX_GROUP_SIZE = 64
"""The largest number of query heads per KV head: their scores stay in registers."""
MIN_TOKENS_PER_COPY = 8
"""The fewest tokens that are copied at once."""
MAX_BLOCK_SIZE = 4096
"""The longest block: a step has whole blocks."""
MAX_SMEM_WORDS = 2**17
"""The most words of lists and pages in scalar memory."""
MIN_TOKENS_OF_FAST_COPIES = 32
"""The fewest tokens per copy that the place in the order of choice is estimated for."""


def _priority(record: SelectedAttention, device: DeviceInfo, direction: Direction) -> int:
    """Returns the place in the order of choice: before XLA and `mosaic_tpu` where queries list few of the blocks.

    For 16 requests that list 16 of 512 blocks of 64 keys in pages, the estimates are 86, 52, 44 and 30 µs on v5e, v5p,
    v6e and v7x, and XLA's program takes at least 333, 244, 270 and 254 (docs/lab/tpu_kernels.md). A dense cache has
    `mosaic_tpu`, which reads each block once for all queries. Short copies are not estimated.
    """
    if config.tokens_per_copy(record) < MIN_TOKENS_OF_FAST_COPIES:
        return -5
    if record.block_tables is not None:
        return 20
    listed = record.query.shape[1] * blocks_per_query(record)
    return 20 if listed < cdiv(num_keys(record), record.block_size) else 5


def _refusal_reasons(record: SelectedAttention) -> Iterable[str]:
    """Yields the reasons to refuse a record that `Requires` cannot express."""
    heads, kv_heads, packed = record.query.shape[2], record.key.shape[2], config.elements_per_word(record)
    if heads // kv_heads > MAX_GROUP_SIZE:
        yield f"query: got {heads // kv_heads} query heads per KV head, the kernel takes at most {MAX_GROUP_SIZE}"
    if kv_heads > 1 and kv_heads % packed:
        yield f"key: got {kv_heads} KV heads of {record.key.dtype.name}, wants 1 or a multiple of {packed}"
    if record.block_size > MAX_BLOCK_SIZE:
        yield f"block_size: got {record.block_size}, the kernel takes at most {MAX_BLOCK_SIZE}"
        return
    copied = config.tokens_per_copy(record)
    if copied < MIN_TOKENS_PER_COPY or (copied % LANES and LANES % copied):
        yield (
            f"key: got rows or pages of {record.key.shape[1]} tokens and blocks of {record.block_size}, wants a common "
            f"divisor of at least {MIN_TOKENS_PER_COPY} that divides {LANES} or is a multiple of it, got {copied}"
        )
        return
    yield from _memory_refusal_reasons(record)


def _memory_refusal_reasons(record: SelectedAttention) -> Iterable[str]:
    """Yields the reasons to refuse a record that does not fit VMEM or scalar memory."""
    smallest = config.fit_config(record, config.SMALLEST_CONFIG)
    if (needed := config.vmem_bytes(record, smallest)) > MAX_VMEM_BYTES:
        yield f"key: got {needed} bytes of VMEM for {smallest.block_kv} keys, the kernel takes {MAX_VMEM_BYTES}"
    if (copies := smallest.block_kv // config.tokens_per_copy(record)) > config.MAX_COPIES_PER_STEP:
        yield f"key: got {copies} copies for {smallest.block_kv} keys, the kernel takes {config.MAX_COPIES_PER_STEP}"
    if (words := config.smem_words(record)) > MAX_SMEM_WORDS:
        yield f"query: got {words} words of lists and pages in scalar memory, the kernel takes {MAX_SMEM_WORDS}"


def implementations() -> tuple[Implementation, ...]:
    """Returns the implementation; its gradients are XLA's."""
    handles = optional_fields(FAMILY.record).keys() - {"block_indices", "block_starts", "kv_segment_ids"}
    return (
        make_mosaic_tpu_implementation(
            FAMILY,
            ConfigSpace.of(config, forward=config.TpuSelectedDecode),
            tpu_requires(supported_fields=handles, refusal_reasons=_refusal_reasons, head_dims=range(1, LANES + 1)),
            folder="selected_attention_decode",
            backward=False,
            name="mosaic_tpu_decode",
            cases="ejkernel_pallas.tpu.selected_attention_decode.cases:cases",
            priority=_priority,
        ),
    )
