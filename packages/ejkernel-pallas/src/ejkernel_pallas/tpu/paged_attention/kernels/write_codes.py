"""Writes new tokens into pages of codes, by XLA, as whole pages.

A slot of a page is one lane in each of its rows of memory. A scatter of slots makes XLA copy the cache to another
layout and back; a scatter of whole pages is in place. So each page that gets tokens is read, changed and written once.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.arithmetic import cdiv
from ejkernel.families.paged_attention import PagedAttention
from ejkernel.families.paged_attention import pages as paged_cache


def write_code_pages(record: PagedAttention) -> tuple[PagedAttention, tuple[jax.Array, ...]]:
    """Returns the record with its new tokens in its pages, and those pages; as `pages.write_new_tokens` does."""
    names = {k: v for k, v in paged_cache.NEW_CODES_BY_PAGES.items() if getattr(record, k) is not None}
    pages, tokens = _written_pages(record)
    written: dict[str, Any] = {}
    for name, new_name in names.items():
        cache, new = getattr(record, name), getattr(record, new_name)
        before = cache.at[pages].get(mode="fill", fill_value=0)
        after = new.astype(cache.dtype).at[tokens].get(mode="fill", fill_value=0)
        is_new = (tokens >= 0).reshape(*tokens.shape, *(1,) * (cache.ndim - 2))
        written[name] = cache.at[pages].set(jnp.where(is_new, after, before), mode="drop")
    cleared = {name: None for name in names.values()}
    return dataclasses.replace(record, **written, **cleared), tuple(written.values())


def _written_pages(record: PagedAttention) -> tuple[jax.Array, jax.Array]:
    """Returns the pages that get tokens, int32 [M], and the token of each of their slots, [M, S]; -1 for none.

    What is no page of the cache is the number of its pages.
    """
    size, total = paged_cache.page_size(record), record.query.shape[0]
    starts, lengths = paged_cache.query_ranges(record)
    first_position = record.kv_lens.astype(jnp.int32) - lengths
    first_entry = jnp.maximum(first_position, 0) // size
    num_entries = jnp.where(lengths > 0, cdiv(first_position + lengths, size) - first_entry, 0)
    ends = jnp.cumsum(jnp.maximum(num_entries, 0), dtype=jnp.int32)
    index = jnp.arange(min(total, total // size + 2 * starts.shape[0]), dtype=jnp.int32)
    owner = jnp.searchsorted(ends, index, side="right", method="scan_unrolled").astype(jnp.int32)
    sequence = jnp.minimum(owner, starts.shape[0] - 1)
    entry = first_entry[sequence] + index - (ends - num_entries)[sequence]
    position = entry[:, None] * size + jnp.arange(size, dtype=jnp.int32)
    offset = position - first_position[sequence][:, None]
    is_new = (index < ends[-1])[:, None] & (offset >= 0) & (offset < lengths[sequence][:, None])
    pages, _ = paged_cache.find_pages_and_slots(record, jnp.where(index < ends[-1], sequence, -1), entry * size)
    tokens = jnp.where(is_new, starts[sequence][:, None] + offset, -1)
    # Sequences may share a page: each of its copies then gets the tokens of all.
    is_same = pages[:, None] == pages[None]
    return pages, jnp.max(jnp.where(is_same[:, :, None], tokens[None], -1), axis=1)
