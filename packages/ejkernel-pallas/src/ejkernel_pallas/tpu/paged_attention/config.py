"""Tile sizes: the heuristic for calls without a measured configuration, and the tuner's candidates."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

from ejkernel.arithmetic import cdiv
from ejkernel.families.paged_attention import PagedAttention
from ejkernel.families.paged_attention import pages as paged_cache
from ejkernel.families.paged_attention.rotation import key_head_dim
from ejkernel.ops.device import current_device
from ejkernel_pallas.tpu.generations import is_v7x
from ejkernel_pallas.tpu.mosaic.paged_functions import paged_functions
from ejkernel_pallas.tpu.mosaic.paged_layout import MEMORY_TILE_ROWS, stores_tokens_along_lanes
from ejkernel_pallas.tpu.mosaic.vectors import LANES
from ejkernel_pallas.tpu.paged_attention.spec import (
    KEYS_PER_CHUNK,
    MAX_CODE_TILE_ROWS,
    PREFETCHED_BLOCKS,
    PagedTiles,
    heads_share_products,
    pair_bias_columns,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TpuPaged:
    """The configuration.

    Attributes:
        block_q: Query rows of one sequence per tile.
        block_kv: Keys per tile.
        parts: Shares of the work, one per core of a chip whose cores are one device.
        product_rows: Query rows per product, in a `batch_invariant` block, where all products of all calls have the
            same sizes; 0 elsewhere.
        product_keys: Keys per product, likewise. Without `product_rows`, of an operation whose calls all have one query
            per sequence: blocks then have `block_kv` keys, however long the caches are.
    """

    block_q: int
    block_kv: int
    parts: int = 1
    product_rows: int = 0
    product_keys: int = 0


PUBLIC_FIELDS = {"q_blocksize": "block_q", "kv_blocksize": "block_kv", "block_k": "block_kv", "seq_blocksize": "parts"}
"""Maps fields of the public configuration to fields of this one."""

TWO_CORE_DEVICE_KINDS = ("TPU v4", "TPU v5", "TPU v5p")
"""Kinds of chips whose two cores work as one device."""

DEFAULT_BLOCK_VMEM_BYTES = 4 * 2**20
"""Bytes of a key block: large enough to hide the lookups in the page table, small enough that three fit into VMEM.

Half as many if every sequence has one query and heads share products. Copies then take longer than products, and a
smaller last block leaves less to compute once its copy has arrived.
"""

DEFAULT_CODE_BLOCK_KEYS = 1024
"""Keys of a block of codes, which are one step of products."""

MAX_PAIR_BIAS_VMEM_BYTES = 4 * 2**20
"""Bytes of VMEM for the bias for pairs of new tokens: the blocks in flight, and the rows of a product."""

MAX_FUNCTION_VMEM_BYTES = 8 * 2**20
"""Bytes of VMEM for the values of functions that are read by key, of the blocks in flight."""

MAX_TILE_ROWS, MAX_TILE_ELEMENTS = 1024, 2**20
"""The largest number of query rows per KV head in a tile, and of 16-bit elements of its rows over all heads."""


INVARIANT_PRODUCT_ROWS, INVARIANT_PRODUCT_KEYS = 64, 512
"""Query rows and keys per product in a `batch_invariant` block: decoding has the products of prompts, in which most of
its rows are padding. docs/lab/batch_invariance.md has the estimates.
"""

MIN_PRODUCT_ROWS = 16
"""The fewest query rows per product: those of one copy."""

MAX_INVARIANT_BLOCK_KEYS = 2**12
"""The most keys of a block of whole pages and whole products, in a `batch_invariant` block."""

MAX_ARRAYS_BY_ROW = 3
"""The largest number of arrays with 128 lanes per row and KV head that half as many rows as usual fit into VMEM."""


def tile_sizes_of(config: TpuPaged) -> PagedTiles:
    """Returns the tile sizes of a configuration."""
    return PagedTiles(config.block_q, config.block_kv, config.parts, config.product_rows, config.product_keys)


def heuristic(record: PagedAttention, device: Any, direction: Any) -> TpuPaged:
    """Returns the default tile sizes for a record on a device, from the static profile."""
    parts = 2 if device.kind in TWO_CORE_DEVICE_KINDS else 1
    return TpuPaged(block_q=default_tile_tokens(record), block_kv=_default_block_keys(record, device.kind), parts=parts)


def batch_invariant(record: PagedAttention, device: Any, direction: Any) -> TpuPaged:
    """Returns the tile sizes of a call in a `batch_invariant` block.

    Tiles follow the call, since no sum depends on them: a tile of any number of tokens, with blocks of any number of
    keys, has products of the same numbers of rows and keys, which begin at the same keys of a sequence. Neither number
    depends on the batch.
    """
    keys = INVARIANT_PRODUCT_KEYS
    while keys > LANES and keys * _token_vmem_bytes(record) > DEFAULT_BLOCK_VMEM_BYTES:
        keys //= 2
    tiles = heuristic(record, device, direction)
    return dataclasses.replace(tiles, product_rows=_invariant_product_rows(record), product_keys=keys)


def _invariant_product_rows(record: PagedAttention) -> int:
    """Returns query rows per product in a `batch_invariant` block: few if a tile of whole products and whole tokens
    would be too large for VMEM.
    """
    kv_heads = paged_cache.kv_heads(record)
    group, row_elements = record.query.shape[1] // kv_heads, kv_heads * max(LANES, key_head_dim(record))
    most = min(MAX_TILE_ROWS, MAX_TILE_ELEMENTS // (row_elements * cdiv(record.query.dtype.itemsize, 2)))
    rows = INVARIANT_PRODUCT_ROWS
    while rows > MIN_PRODUCT_ROWS and math.lcm(rows, 2 * group) > most:
        rows //= 2
    return rows


def invariance_limits(record: PagedAttention) -> Iterable[str]:
    """Yields why rows of a record depend on the rest of its call."""
    if record.code_bits is not None:
        yield "a cache of codes: the rotation of queries and outputs is a product of all tokens of a call"
    if record.shared_prefix is not None:
        yield "shared_prefix: its keys are a call of their own, whose results are merged with those of the others"
    if record.alibi_slopes is not None:
        yield "alibi_slopes: distances are counted from the first new token, so scores are rounded as the chunk has it"
    for name in ("qq_bias", "score_mod", "mask_mod"):
        if getattr(record, name) is not None:
            yield f"{name}: not tested with other batches"
    keys, slots = batch_invariant(record, current_device(), "forward").product_keys, paged_cache.page_size(record)
    if math.lcm(keys, slots) > MAX_INVARIANT_BLOCK_KEYS:
        block = f"no block of at most {MAX_INVARIANT_BLOCK_KEYS} keys has whole pages of {slots}"
        yield f"key_pages: {block} and whole products of {keys} keys"


def prefix_config(record: PagedAttention) -> TpuPaged:
    """Returns the tile sizes for the keys of a shared prefix: a small batch has one tile per core."""
    kind = current_device().kind
    parts = 2 if kind in TWO_CORE_DEVICE_KINDS else 1
    terms = (record.alibi_slopes, record.score_mod, record.mask_mod)
    most = default_tile_tokens(record) // (1 if all(x is None for x in terms) else 2)  # each row has a slope in VMEM
    queries = min(most, cdiv(record.query.shape[0], parts))
    # A tile of one token has the mask of one sequence, and rows of a prefix have positions of their own.
    return TpuPaged(block_q=max(2, queries), block_kv=_default_block_keys(record, kind), parts=parts)


def candidates(record: PagedAttention, device: Any, direction: Any) -> tuple[TpuPaged, ...]:
    """Returns tile sizes worth measuring for a record on a device."""
    parts = 2 if device.kind in TWO_CORE_DEVICE_KINDS else 1
    keys = _default_block_keys(record, device.kind)
    return tuple(
        TpuPaged(block_q=queries, block_kv=block, parts=parts)
        for queries in dict.fromkeys((default_tile_tokens(record), max(1, default_tile_tokens(record) // 2)))
        for block in dict.fromkeys((keys, max(128, keys // 2), keys * 2))
    )


def default_tile_tokens(record: PagedAttention) -> int:
    """Returns query tokens per tile by default: 1 for decode, where no sequence needs more.

    The average length of a mixed batch says nothing: one sequence may have nearly all of its tokens. The size of trees
    of draft tokens does: a tile of one tree needs no mask for the keys before the tree.
    """
    tokens, heads, _ = record.query.shape
    if record.query_start is None or tokens <= record.kv_lens.shape[0]:
        return 1
    words = cdiv(record.query.dtype.itemsize, 2)
    most = min(
        MAX_TILE_ROWS * paged_cache.kv_heads(record) // heads,
        MAX_TILE_ELEMENTS // (heads * max(LANES, key_head_dim(record)) * words),
    )
    by_row = (record.softmax_aux is not None) + (record.alibi_slopes is not None) + (record.shared_prefix is not None)
    functions = paged_functions(record)
    if functions is not None:
        by_row += cdiv(2 * functions.num_planes(paged_cache.kv_heads(record)), paged_cache.kv_heads(record))
    if by_row > 1:  # each row has sinks, slopes or values of functions in VMEM, or an output in float32
        most //= max(2, cdiv(by_row, MAX_ARRAYS_BY_ROW))
    if record.code_bits is not None:
        most = min(most, MAX_CODE_TILE_ROWS * paged_cache.kv_heads(record) // heads)
    if record.qq_bias is not None:
        align = 16 // math.gcd(16, heads // paged_cache.kv_heads(record))
        most = min(most, cdiv(pair_bias_columns(record), align) * align)
    return max(1, min(most, tokens))


def _default_block_keys(record: PagedAttention, kind: str) -> int:
    if record.code_bits is not None:
        return min(DEFAULT_CODE_BLOCK_KEYS, cdiv(paged_cache.max_sequence_len(record), LANES) * LANES)
    most = (
        DEFAULT_BLOCK_VMEM_BYTES // 2
        if default_tile_tokens(record) == 1 and heads_share_products(record) and not is_v7x(kind)
        else DEFAULT_BLOCK_VMEM_BYTES
    )
    keys = min(block_keys_in_vmem(record, most), cdiv(paged_cache.max_sequence_len(record), 128) * 128)
    while keys > 128 and (
        _pair_bias_vmem_bytes(record, keys) > MAX_PAIR_BIAS_VMEM_BYTES
        or _function_vmem_bytes(record, keys) > MAX_FUNCTION_VMEM_BYTES
    ):
        keys = cdiv(keys // 2, 128) * 128
    return keys


def block_keys_in_vmem(record: PagedAttention, most: int = DEFAULT_BLOCK_VMEM_BYTES) -> int:
    """Returns the keys of the largest block of at most `most` bytes, a power of 2; the length of the cache and the
    number of sequences do not matter.
    """
    token, keys = _token_vmem_bytes(record), LANES
    while keys < 4096 and 2 * keys * token <= most:
        keys *= 2
    return keys


def _token_vmem_bytes(record: PagedAttention) -> int:
    """Returns bytes of VMEM for the keys and values of a token."""
    arrays = [x for x in (record.key_pages, record.value_pages) if x is not None]
    slots = paged_cache.page_count(record) * paged_cache.page_size(record)
    rows = [math.prod(x.shape[:-1]) // max(1, slots) * x.dtype.itemsize for x in arrays]
    dense = record.latent is not None and record.kv_layout != paged_cache.LATENT_LAYOUT
    # memory pads rows to multiples of these
    units = [MEMORY_TILE_ROWS if dense and stores_tokens_along_lanes(x.shape[-1]) else LANES for x in arrays]
    return sum(n * cdiv(x.shape[-1], unit) * unit for n, x, unit in zip(rows, arrays, units, strict=True))


def _function_vmem_bytes(record: PagedAttention, keys: int) -> int:
    """Returns bytes of VMEM for the values of functions that are read by key with blocks of so many keys."""
    functions = paged_functions(record)
    lines = 0 if functions is None else functions.num_lines(record.query.shape[1])
    return 4 * (PREFETCHED_BLOCKS + 1) * lines * keys


def _pair_bias_vmem_bytes(record: PagedAttention, keys: int) -> int:
    """Returns bytes of VMEM for the bias for pairs with blocks of so many keys."""
    if record.qq_bias is None:
        return 0
    tokens = default_tile_tokens(record)
    rows = tokens * record.query.shape[1] // paged_cache.kv_heads(record)
    return 4 * ((PREFETCHED_BLOCKS + 1) * tokens * (keys + LANES) + rows * min(keys, KEYS_PER_CHUNK))
