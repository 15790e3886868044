"""Paged softmax attention in Mosaic TPU: one kernel for caches that are only read and for those that are written to.

The requirements of the kernel are data in this module, which imports nothing of Pallas.
"""

import dataclasses
import math
from collections.abc import Generator
from typing import Any

import jax.numpy as jnp

from ejkernel.arithmetic import cdiv
from ejkernel.families.paged_attention import FAMILY, PagedAttention
from ejkernel.families.paged_attention import pages as paged_cache
from ejkernel.families.paged_attention.mask_functions import with_windows_of_function
from ejkernel.families.paged_attention.rotation import key_head_dim
from ejkernel.ops import ConfigSpace, Implementation
from ejkernel_pallas.tpu.mosaic.paged_functions import paged_function_refusal_reasons
from ejkernel_pallas.tpu.mosaic.paged_layout import key_and_value_share_row, make_code_format, rows_per_token
from ejkernel_pallas.tpu.mosaic.vectors import LANES
from ejkernel_pallas.tpu.paged_attention import config
from ejkernel_pallas.tpu.paged_attention.plan import ITEM_FIELDS
from ejkernel_pallas.tpu.requirements import make_mosaic_tpu_implementation, tpu_requires

SUPPORTED_OPTIONAL_FIELDS = frozenset(
    {
        "alibi_slopes",
        "causal",
        "chunk_size",
        "latent",
        "compute_dtype",
        "index_origin",
        "logits_soft_cap",
        "mask_mod",
        "new_keys",
        "new_values",
        "num_seqs",
        "qq_bias",
        "score_mod",
        "shared_prefix",
        "sliding_window",
        "softmax_aux",
        "value_scale",
        # a cache of TurboQuant's codes
        "code_bits",
        "key_codebook",
        "key_norms",
        "key_signs",
        "new_key_norms",
        "new_key_signs",
        "new_value_norms",
        "projection",
        "rotation",
        "value_codebook",
        "value_norms",
    }
)
"""Optional fields that the kernel honours."""

SUPPORTED_OPERATIONS = frozenset(
    {
        "chunked_prefill_paged_decode",
        "decode_attention",
        "multi_latent_ragged_page_attention",
        "multi_latent_ragged_page_attention_v2",
        "page_attention",
        "prefill_page_attention",
        "ragged_page_attention_v2",
        "ragged_page_attention_v2_turboquant",
        "ragged_page_attention_v3",
        "ragged_page_attention_v3_turboquant",
        "unified_attention",
    }
)
"""The operations on pages that the kernel serves."""


UNPADDED_ROWS_PER_TOKEN = (1, 2, 4)
"""Rows per token that memory stores without padding, in addition to multiples of 8."""

NORM_DTYPES = ("bfloat16", "float32")
"""Dtypes of the norms in a cache of codes."""
CACHE_DTYPES = ("bfloat16", "float32", "float8_e4m3fn", "float8_e5m2", "int8")
MAX_HEAD_DIM, MAX_LATENT_DIM = 256, 1024
"""The largest head dimension, and that of latent vectors with their rotary part."""
MAX_TABLE_SMEM_WORDS = 2**18 - 2**13
"""Words of scalar memory for tables and the work list: all of it, minus the kernel's own use."""

MAX_PAGE_AND_LANES_MULTIPLE = 2**12
"""The largest common multiple of page size and lanes, in keys."""


def refusal_reasons(record: PagedAttention) -> Generator[str]:
    """Yields the reasons to refuse a record."""
    pages = record.key_pages
    most = MAX_LATENT_DIM if record.latent is not None else MAX_HEAD_DIM
    if max(key_head_dim(record), paged_cache.value_head_dim(record)) > most:
        sizes = f"{key_head_dim(record)} and {paged_cache.value_head_dim(record)}"
        yield f"query: got head sizes {sizes}, the kernel takes at most {most}"
    if record.code_bits is None and pages.dtype.name not in CACHE_DTYPES:
        yield f"key_pages: dtype {pages.dtype.name} is not among {', '.join(CACHE_DTYPES)}"
        return
    if record.block_tables is None:
        yield "block_tables: the kernel does not read a cache without pages"
        return
    tiles, entries = _max_query_tiles(record), record.block_tables.size
    if record.alibi_slopes is not None or record.qq_bias is not None:
        entries += record.kv_lens.size  # tokens before each sequence's queries
    if entries + tiles * len(ITEM_FIELDS) > MAX_TABLE_SMEM_WORDS:
        yield (
            f"block_tables: {entries} entries and {tiles} tiles of query rows do not fit into scalar memory; "
            f"wants entries + {len(ITEM_FIELDS)} * tiles <= {MAX_TABLE_SMEM_WORDS}"
        )
    computes_narrower = (
        record.compute_dtype is not None and jnp.dtype(record.compute_dtype).itemsize < pages.dtype.itemsize
    )
    if computes_narrower and jnp.dtype(record.compute_dtype) != jnp.bfloat16:
        yield f"compute_dtype: keys and values are rounded to bfloat16, not to {jnp.dtype(record.compute_dtype).name}"
    yield from _page_refusal_reasons(record)
    yield from paged_function_refusal_reasons(with_windows_of_function(record))
    if record.shared_prefix is not None and record.new_keys is not None:
        yield from _written_prefix_refusal_reasons(record)


def _max_query_tiles(record: PagedAttention) -> int:
    """Returns an upper bound on tiles of query rows by default; the kernel may split tiles, but at most in halves."""
    sequences, rows = record.kv_lens.shape[0], record.query.shape[0]
    return sequences if record.query_start is None else rows // cdiv(config.default_tile_tokens(record), 2) + sequences


def _page_refusal_reasons(record: PagedAttention) -> Generator[str]:
    slots, layout, dtype = paged_cache.page_size(record), record.kv_layout, record.key_pages.dtype
    sizes: list[Any] = [x.shape[-1] for x in (record.key_pages, record.value_pages) if x is not None]
    if math.lcm(slots, LANES) > MAX_PAGE_AND_LANES_MULTIPLE:
        block = f"no block of at most {MAX_PAGE_AND_LANES_MULTIPLE} keys has whole pages of {slots} and whole lanes"
        yield f"key_pages: {block}"
    if record.code_bits is not None:
        yield from _code_refusal_reasons(record)
        return
    if layout == paged_cache.LATENT_LAYOUT:
        yield from _latent_page_refusal_reasons(record)
        return
    if layout in ("phsd", "hpsd"):
        row_multiple = 32 // dtype.itemsize
        if slots % row_multiple:
            yield f"key_pages: pages of {slots} slots in a head-major layout; wants a multiple of {row_multiple}"
        return
    if any(size > LANES and size % LANES for size in sizes) or len({cdiv(size, LANES) for size in sizes}) > 1:
        yield f"key_pages: rows of {' and '.join(map(str, sizes))} elements; above {LANES} wants equal multiples of it"
    rows, pack = rows_per_token(record), paged_cache.values_per_32_bits(dtype)
    if record.new_keys is not None and layout == paged_cache.COMBINED_LAYOUT:
        if rows % pack:
            yield f"key_pages: {rows} rows of {dtype.name} per token do not fill words; wants a multiple of {pack}"
        return
    if (rows not in UNPADDED_ROWS_PER_TOKEN and rows % 8) or rows % pack:
        yield f"key_pages: {rows} rows of {dtype.name} per token do not fill tiles; wants 1, 2, 4, or a multiple of 8"


def _written_prefix_refusal_reasons(record: PagedAttention) -> Generator[str]:
    """Yields the reasons to refuse a call with new tokens whose second run, over the prefix, cannot read the cache."""
    if record.kv_layout != paged_cache.COMBINED_LAYOUT:
        return
    if key_and_value_share_row(record):
        yield (
            f"shared_prefix: with new keys, whose heads share rows of {LANES} lanes with their values, reading the "
            "prefix would copy the cache"
        )
        return
    reading = dataclasses.replace(record, new_keys=None, new_values=None)
    yield from (f"shared_prefix: with new keys, {reason}" for reason in _page_refusal_reasons(reading))


def _code_refusal_reasons(record: PagedAttention) -> Generator[str]:
    """Yields the reasons to refuse a cache of TurboQuant's codes."""
    slots, codes = paged_cache.page_size(record), make_code_format(record)
    if slots % LANES:
        yield (
            f"key_pages: pages of {slots} slots of codes; wants a multiple of {LANES}: XLA stores smaller pages with "
            "pages along lanes, so that the bytes of a page are not next to each other"
        )
    for what, rows in (("keys", codes.keys), ("values", codes.values), ("signs", codes.signs)):
        if rows is not None and not rows.is_supported:
            yield (
                f"key_pages: {what} of {rows.count} codes of {rows.bits} bits; wants 1, 2, 4 or a multiple of 8 words "
                "of 32 bits per vector, or a multiple of 64 codes of 3 bits"
            )
        elif rows is not None and rows.stored_bytes % LANES == 0:
            size = f"{what} of {rows.stored_bytes} bytes"
            yield f"key_pages: {size}, which XLA stores along lanes; wants less than {LANES}"
    for norms in (record.key_norms, record.value_norms):
        if norms is not None and norms.dtype.name not in NORM_DTYPES:
            yield f"key_pages: norms of {norms.dtype.name}; wants {' or '.join(NORM_DTYPES)}"
    if record.compute_dtype is not None:
        yield "compute_dtype: the kernel does not round unpacked keys and values"
    if record.shared_prefix is not None:
        yield "shared_prefix: the kernel reads no shared prefix from codes"


def _latent_page_refusal_reasons(record: PagedAttention) -> Generator[str]:
    slots, pages, (_, start) = paged_cache.page_size(record), record.key_pages, record.latent or (0, 0)
    pack = paged_cache.values_per_32_bits(pages.dtype)
    if slots % pack:
        yield f"kv_cache: pages of {slots} slots of {pages.dtype.name}; wants a multiple of {pack}"
    if pages.shape[-1] % LANES or start % LANES:
        yield f"kv_cache: rows of {pages.shape[-1]} elements, rotary part at {start}; wants multiples of {LANES}"


def implementations() -> tuple[Implementation, ...]:
    """Returns the implementation."""
    return (
        make_mosaic_tpu_implementation(
            FAMILY,
            ConfigSpace.of(config, forward=config.TpuPaged, fixed_if_invariant=("product_rows", "product_keys")),
            tpu_requires(
                head_dims=range(1, 1025), supported_fields=SUPPORTED_OPTIONAL_FIELDS, refusal_reasons=refusal_reasons
            ),
            backward=False,
            only=SUPPORTED_OPERATIONS,
            invariant_to=frozenset({"batch", "padding", "chunking", "pages"}),
            invariance_limits=config.invariance_limits,
            cases="ejkernel_pallas.tpu.paged_attention.cases:cases",
        ),
    )
