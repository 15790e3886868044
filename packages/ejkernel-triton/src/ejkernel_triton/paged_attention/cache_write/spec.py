"""The compile-time constants of the kernel that writes new tokens into a cache of pages."""

import dataclasses

import jax

from ejkernel.families.paged_attention import PagedAttention
from ejkernel.families.paged_attention import pages as paged_cache
from ejkernel_triton.paged_attention.spec import Strides, page_slot_head_strides
from ejkernel_triton.sizes import pad_to_dot_size


@dataclasses.dataclass(frozen=True, kw_only=True)
class WriteSpec:
    """Constants of the kernel that writes new tokens.

    Attributes:
        NUM_TOKENS: Query rows, each with a token.
        NUM_SEQUENCES: Sequences.
        PAGES_PER_SEQUENCE: Entries per sequence of the block table.
        NUM_ENTRIES: Entries of the work list.
        BLOCK_Q: Query rows per entry.
        HK: KV heads of the tokens.
        CACHE_HEADS: Heads of the cache, including padding heads.
        KV_COMPONENTS: 2 if keys and values are in one array, one after the other.
        D: Columns of a token.
        CACHE_ROW_WIDTH: Columns of a row of the cache.
        PADDED_ROW_WIDTH: CACHE_ROW_WIDTH, padded to a power of two.
        NUM_LEADING_COLUMNS: Number of a token's columns at the start of a row.
        TRAILING_COLUMNS_START: Column of a row of the cache at which the token's other columns start.
        NUM_PAGES: Pages of the cache.
        PAGE_SIZE: Slots per page.
        PAGE_SLOT_HEAD_STRIDES: Strides of pages, slots and heads, in elements.
        CACHE_BATCH_STRIDE: Elements between the caches of two batch rows.
    """

    NUM_TOKENS: int
    NUM_SEQUENCES: int
    PAGES_PER_SEQUENCE: int
    NUM_ENTRIES: int
    BLOCK_Q: int
    HK: int
    CACHE_HEADS: int
    KV_COMPONENTS: int
    D: int
    CACHE_ROW_WIDTH: int
    PADDED_ROW_WIDTH: int
    NUM_LEADING_COLUMNS: int
    TRAILING_COLUMNS_START: int
    NUM_PAGES: int
    PAGE_SIZE: int
    PAGE_SLOT_HEAD_STRIDES: Strides
    CACHE_BATCH_STRIDE: int


def make_write_spec(
    record: PagedAttention, kv_components: tuple[jax.Array, ...], pages: jax.Array, *, num_entries: int, block_q: int
) -> WriteSpec:
    """Returns the constants of the kernel that writes new tokens into one array of the cache.

    Args:
        record: The canonical arguments, with block tables.
        kv_components: The keys, or keys and values, that go into the array, [T, HK, D].
        pages: The array.
        num_entries: Entries of the work list.
        block_q: Query rows per entry, at most.
    """
    assert record.block_tables is not None
    (tokens, kv_heads, width), row_width = kv_components[0].shape, pages.shape[-1]
    first_part_width, second_part_start = record.latent or (width, width)
    layout = record.kv_layout
    return WriteSpec(
        NUM_TOKENS=tokens,
        NUM_SEQUENCES=record.kv_lens.shape[0],
        PAGES_PER_SEQUENCE=record.block_tables.shape[1],
        NUM_ENTRIES=num_entries,
        BLOCK_Q=block_q,
        HK=kv_heads,
        CACHE_HEADS=pages.shape[layout.index("h")] if "h" in layout else 1,
        KV_COMPONENTS=len(kv_components),
        D=width,
        CACHE_ROW_WIDTH=row_width,
        PADDED_ROW_WIDTH=pad_to_dot_size(row_width),
        NUM_LEADING_COLUMNS=first_part_width,
        TRAILING_COLUMNS_START=second_part_start,
        NUM_PAGES=paged_cache.page_count(record),
        PAGE_SIZE=paged_cache.page_size(record),
        PAGE_SLOT_HEAD_STRIDES=page_slot_head_strides(pages, layout),
        CACHE_BATCH_STRIDE=pages.size,
    )
