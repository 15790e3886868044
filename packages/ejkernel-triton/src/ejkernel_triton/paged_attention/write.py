"""Launches the kernel that writes new tokens into their pages, in place, by the call's work list."""

import dataclasses

import jax
import jax.numpy as jnp

from ejkernel.families.paged_attention import PagedAttention
from ejkernel.families.paged_attention import pages as paged_cache
from ejkernel_triton.launch import launch
from ejkernel_triton.paged_attention.spec import Strides, padded, strides_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class WriteSpec:
    """Constants of the kernel.

    Attributes:
        TOKENS: Query rows, each with a token.
        SEQUENCES: Sequences.
        TABLE: Entries of a sequence's block table.
        ENTRIES: Entries of the work list.
        BLOCK_Q: Query rows of an entry.
        HK: KV heads of the tokens.
        HEADS: Heads of the cache: more, where some only pad it.
        COMPONENTS: 2 where keys and values are in one array, behind each other.
        D: Columns of a token.
        LANES: Columns of a row of the cache.
        WIDTH: LANES, padded to a power of two.
        SPLIT: Columns of a token that come first in a row.
        SECOND: Column of a row of the cache at which a token's other columns begin.
        PAGES: Pages of the cache.
        PAGE_SIZE: Slots of a page.
        STRIDES: Elements from page to page, slot to slot and head to head.
        ELEMENTS: Elements of one batch row's cache.
    """

    TOKENS: int
    SEQUENCES: int
    TABLE: int
    ENTRIES: int
    BLOCK_Q: int
    HK: int
    HEADS: int
    COMPONENTS: int
    D: int
    LANES: int
    WIDTH: int
    SPLIT: int
    SECOND: int
    PAGES: int
    PAGE_SIZE: int
    STRIDES: Strides
    ELEMENTS: int


def write(record: PagedAttention, work: jax.Array, block_q: int) -> tuple[PagedAttention, tuple[jax.Array, ...]]:
    """The record with its new tokens in its pages, and those pages; as `paged_cache.write`.

    Args:
        record: The record.
        work: Its work list, [W, fields].
        block_q: Most query rows of an entry.
    """
    if record.new_keys is None or record.block_tables is None:
        return paged_cache.write(record)
    keys, values = record.new_keys, record.new_values
    if record.value_pages is None:  # a combined cache, or a latent one
        pages = (_write_one(record, keys, values, record.key_pages, work, block_q),)
        written = dataclasses.replace(record, key_pages=pages[0], new_keys=None, new_values=None)
        return written, pages
    assert values is not None
    pages = (
        _write_one(record, keys, None, record.key_pages, work, block_q),
        _write_one(record, values, None, record.value_pages, work, block_q),
    )
    written = dataclasses.replace(record, key_pages=pages[0], value_pages=pages[1], new_keys=None, new_values=None)
    return written, pages


def _write_one(
    record: PagedAttention,
    keys: jax.Array,
    values: jax.Array | None,
    pages: jax.Array,
    work: jax.Array,
    block_q: int,
) -> jax.Array:
    """One array of the cache with the tokens in it."""
    from ejkernel_triton.paged_attention.write_kernel import write_kernel

    assert record.block_tables is not None
    layout, lanes = record.kv_layout, pages.shape[-1]
    split, second = record.latent or (keys.shape[2], keys.shape[2])
    heads = pages.shape[layout.index("h")] if "h" in layout else 1
    spec = WriteSpec(
        TOKENS=keys.shape[0],
        SEQUENCES=record.kv_lens.shape[0],
        TABLE=record.block_tables.shape[1],
        ENTRIES=work.shape[0],
        BLOCK_Q=block_q,
        HK=keys.shape[1],
        HEADS=heads,
        COMPONENTS=1 if values is None else 2,
        D=keys.shape[2],
        LANES=lanes,
        WIDTH=padded(lanes),
        SPLIT=split,
        SECOND=second,
        PAGES=paged_cache.page_count(record),
        PAGE_SIZE=paged_cache.page_size(record),
        STRIDES=strides_of(pages, layout),
        ELEMENTS=pages.size,
    )
    tokens = [None if x is None else x.astype(pages.dtype)[None] for x in (keys, values)]
    (written,) = launch(
        write_kernel,
        (*tokens, work[None], record.block_tables.astype(jnp.int32)[None], pages[None]),
        (4,),
        batch=1,
        grid=spec.ENTRIES * heads * spec.COMPONENTS,
        num_warps=1 if block_q * spec.WIDTH <= 1024 else 4,
        num_stages=1,
        constants={"spec": spec},
    )
    return written[0]
