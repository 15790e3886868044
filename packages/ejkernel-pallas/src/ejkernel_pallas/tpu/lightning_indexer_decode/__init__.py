"""The decode step of the lightning indexer in Mosaic TPU: one to a few queries per request, keys dense or in pages.

The requirements and limits of the kernel are data in this module, so Pallas is not imported before a call.
"""

from collections.abc import Iterable

from ejkernel.families.lightning_indexer import FAMILY, LightningIndexer, num_keys
from ejkernel.ops import ConfigSpace, Implementation
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.params import Direction
from ejkernel_pallas.tpu.lightning_indexer import HEAD_DIMS, MAX_HEADS, MAX_TOP_K
from ejkernel_pallas.tpu.lightning_indexer_decode import config
from ejkernel_pallas.tpu.mosaic.vectors import LANES
from ejkernel_pallas.tpu.requirements import (
    MAX_VMEM_BYTES,
    SUPPORTED_DTYPES_AND_FLOAT8,
    make_mosaic_tpu_implementation,
    tpu_requires,
)

HANDLES = frozenset({"block_tables", "key_scales", "rectify"})
MAX_QUERIES = 8
"""The most queries per batch row: each is selected for separately."""
MAX_KEYS = 2**23
"""The most keys of a row: the number of 128 keys, of which a key is, has two bytes."""
MAX_QUERIES_OF_FEW_KEYS = 2
"""The most queries per batch row that take less time than in XLA's program with any number of keys."""
MIN_TILE_OF_XLA, MIN_TILES_OF_XLA = 512, 6
"""The fewest keys of a tile of XLA's program, and the fewest tiles for which more queries take less time here."""
MAX_SMEM_WORDS = 2**17
"""The most words of tables and ranges of keys in scalar memory."""


def _priority(record: LightningIndexer, device: DeviceInfo, direction: Direction) -> int:
    """Returns the place in the order of choice: after XLA's for several queries that select from few keys.

    On v6e, the estimates of 16 requests that select 2048 keys are 464 µs for one query of 32768 keys, where XLA's
    program takes 5686 without its sorts, but 1174 for eight queries of 4096 keys, where it takes 698. XLA's time grows
    with its tiles of keys, which have at least as many keys as are selected; the two meet at some 5 tiles
    (docs/lab/tpu_kernels.md).
    """
    has_many_tiles = num_keys(record) >= MIN_TILES_OF_XLA * max(MIN_TILE_OF_XLA, record.top_k)
    return 20 if record.query.shape[1] <= MAX_QUERIES_OF_FEW_KEYS or has_many_tiles else -5


def _refusal_reasons(record: LightningIndexer) -> Iterable[str]:
    """Yields the reasons to refuse a record that `Requires` cannot express."""
    tokens, heads = record.query.shape[1:3]
    if tokens > MAX_QUERIES:
        yield f"query: got {tokens} queries per row, the kernel takes at most {MAX_QUERIES}"
        return
    if heads > MAX_HEADS:
        yield f"query: got {heads} heads, the kernel takes at most {MAX_HEADS}"
    if record.top_k > MAX_TOP_K:
        yield f"top_k: got {record.top_k}, the kernel selects at most {MAX_TOP_K}"
    yield from _page_refusal_reasons(record)
    yield from _memory_refusal_reasons(record)


def _page_refusal_reasons(record: LightningIndexer) -> Iterable[str]:
    """Yields the reasons to refuse pages that are not whole tiles of memory."""
    if record.block_tables is None:
        return
    slots, tile_rows = record.key.shape[1], 32 // record.key.dtype.itemsize
    if slots < 1 or slots % tile_rows or (slots % LANES and LANES % slots):
        yield (
            f"key: got pages of {slots} slots of {record.key.dtype.name}, wants a multiple of {tile_rows} that divides "
            f"{LANES}, or a multiple of {LANES}"
        )
    if slots > config.MAX_PAGE_SLOTS:
        yield f"key: got pages of {slots} slots, the kernel takes at most {config.MAX_PAGE_SLOTS}"
    if record.key.shape[2] % LANES:
        yield f"key: got {record.key.shape[2]} channels, the kernel wants a multiple of {LANES}"


def _memory_refusal_reasons(record: LightningIndexer) -> Iterable[str]:
    """Yields the reasons to refuse a record that does not fit VMEM or scalar memory."""
    keys, smallest = num_keys(record), config.smallest_config(record)
    if keys > MAX_KEYS:
        yield f"key: got {keys} keys per row, the kernel takes at most {MAX_KEYS}"
    elif (needed := config.vmem_bytes(record, smallest.block_k)) > MAX_VMEM_BYTES:
        yield f"key: got {needed} bytes of VMEM for {keys} keys per row, the kernel takes {MAX_VMEM_BYTES}"
    if (words := config.smem_words(record, smallest.block_k)) > MAX_SMEM_WORDS:
        yield f"query: got {words} words of tables in scalar memory, the kernel takes {MAX_SMEM_WORDS}"


def implementations() -> tuple[Implementation, ...]:
    """Returns the implementation; its gradients are XLA's."""
    return (
        make_mosaic_tpu_implementation(
            FAMILY,
            ConfigSpace.of(config, forward=config.TpuIndexerDecodeTiles),
            tpu_requires(
                supported_fields=HANDLES,
                refusal_reasons=_refusal_reasons,
                head_dims=HEAD_DIMS,
                dtypes=SUPPORTED_DTYPES_AND_FLOAT8,
            ),
            folder="lightning_indexer_decode",
            backward=False,
            name="mosaic_tpu_decode",
            cases="ejkernel_pallas.tpu.lightning_indexer_decode.cases:cases",
            priority=_priority,
        ),
    )
