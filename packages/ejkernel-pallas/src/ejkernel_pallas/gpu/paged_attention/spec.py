"""The compile-time constants of Hopper's paged kernel, and its refusals."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp

from ejkernel.arithmetic import LOG2E, cdiv
from ejkernel.families.paged_attention import PagedAttention, causal_window_bounds
from ejkernel.families.paged_attention import pages as paged_cache
from ejkernel_pallas.gpu.hopper.sizes import SHARED_MEMORY_BYTES, WGMMA_M
from ejkernel_pallas.gpu.latent_attention.spec import KEYS_PER_STEP, SWIZZLE_ATOM_ROWS
from ejkernel_pallas.gpu.paged_attention.config import HopperPaged

HEAD_DIMS = (64, 128)
"""Head dimensions of keys and of values."""
RESERVED_SMEM_BYTES = 4 * 1024
"""Bytes of shared memory for mbarriers and Mosaic's own use."""


@dataclasses.dataclass(frozen=True)
class PagedSpec:
    """Constants of the kernel.

    Attributes:
        num_items: Items: tiles of query tokens, each of one sequence; 0 until they are counted.
        tokens_per_tile: Query tokens per tile.
        rows_per_token: Rows per token and KV head: its query heads, padded to a multiple of eight (see
            `rows_per_token`). A tile has `tokens * group` rows of scores, padded to 64.
        tiles_per_item: KV heads, each of which has a tile of every item.
        query_rows_per_kv_head: Rows per KV head in the query's array: those of all tokens, and a tile of zeros after
            them.
        programs_per_kv_head: Persistent thread blocks per KV head, which share its key blocks.
        cache_layout: The cache's layout.
        page_size: Slots per page.
        num_pages: Pages of the cache.
        pages_per_table_row: Entries per block table; 0 if sequence n has page n.
        slots_per_copy: Slots per copy.
        key_dim: Head dimension of keys.
        value_dim: Head dimension of values.
        keys_to_values_stride: Elements between the keys and values of a head of a combined cache.
        left_window: Keys before a query's own that it attends to; None for all.
        right_window: Keys after its own that it attends to; None for all.
        softmax_scale_log2: Factor that converts products to base 2.
        rescales_lazily: As `HopperPaged.lazy_rescaling`.
        stages: Blocks of keys and values in shared memory.
        dtype: Dtype of queries, cache and output.
        value_scale: Factor on the output.
    """

    num_items: int
    tokens_per_tile: int
    rows_per_token: int
    tiles_per_item: int
    query_rows_per_kv_head: int
    programs_per_kv_head: int
    cache_layout: str
    page_size: int
    num_pages: int
    pages_per_table_row: int
    slots_per_copy: int
    key_dim: int
    value_dim: int
    keys_to_values_stride: int
    left_window: int | None
    right_window: int | None
    softmax_scale_log2: float
    rescales_lazily: bool
    stages: int
    dtype: Any
    value_scale: float

    @property
    def stored_rows_per_item(self) -> int:
        """Returns the rows of all tiles of an item; padding is dropped after merging."""
        return self.tiles_per_item * WGMMA_M

    @property
    def num_thread_blocks(self) -> int:
        """Returns thread blocks."""
        return self.programs_per_kv_head * self.tiles_per_item


def rows_per_token(record: PagedAttention) -> int:
    """Returns the rows of a token in a KV head's tile: its query heads, padded to a multiple of eight.

    A tile may start at any token, but a copy in the layout of products only at a multiple of eight rows.
    """
    return cdiv(record.query.shape[1] // paged_cache.kv_heads(record), SWIZZLE_ATOM_ROWS) * SWIZZLE_ATOM_ROWS


def tokens_per_tile(record: PagedAttention) -> int:
    """Returns the number of query tokens whose rows of one KV head fill 64."""
    return max(1, WGMMA_M // rows_per_token(record))


def make_spec(record: PagedAttention, params: HopperPaged) -> PagedSpec:
    """Returns the constants of a record's kernel, without the items of its schedule.

    Args:
        record: The canonical arguments, without new tokens.
        params: Programs and stages.

    Raises:
        ValueError: The configuration has no program or no stage, or treats single tokens as prefill.
    """
    if params.num_programs < 1 or params.stages < 1 or params.prefill_tokens < 2:
        raise ValueError(
            f"cfg: got {params}, wants num_programs and stages of at least 1, prefill_tokens of at least 2"
        )
    tokens, _, key_dim = record.query.shape
    kv_heads, slots, value_dim = paged_cache.kv_heads(record), paged_cache.page_size(record), value_head_dim(record)
    left, right = causal_window_bounds(record)
    group = rows_per_token(record)
    # The number of stages that fit after the queries, with 2 bytes per element: three for keys and values of 128.
    max_stages = (SHARED_MEMORY_BYTES - RESERVED_SMEM_BYTES - 2 * WGMMA_M * key_dim) // (
        2 * KEYS_PER_STEP * (key_dim + value_dim)
    )
    return PagedSpec(
        num_items=0,
        tokens_per_tile=tokens_per_tile(record),
        rows_per_token=group,
        tiles_per_item=kv_heads,
        query_rows_per_kv_head=tokens * group + WGMMA_M,
        programs_per_kv_head=max(1, params.num_programs // kv_heads),
        cache_layout=record.kv_layout,
        page_size=slots,
        num_pages=paged_cache.page_count(record),
        pages_per_table_row=0 if record.block_tables is None else record.block_tables.shape[1],
        slots_per_copy=KEYS_PER_STEP if record.block_tables is None else min(KEYS_PER_STEP, slots),
        key_dim=key_dim,
        value_dim=value_dim,
        keys_to_values_stride=record.key_pages.shape[-1],
        left_window=left,
        right_window=right,
        softmax_scale_log2=record.softmax_scale * LOG2E,
        rescales_lazily=params.lazy_rescaling,
        stages=min(params.stages, max_stages),
        dtype=jnp.dtype(record.query.dtype),
        value_scale=record.value_scale,
    )


def value_head_dim(record: PagedAttention) -> int:
    """Returns the head dimension of values."""
    return paged_cache.value_head_dim(record)


def refusal_reasons(record: PagedAttention) -> Iterable[str]:
    """Yields the reasons why the kernel cannot serve a record."""
    if record.latent is not None:
        yield "the cache has latent vectors; the kernel wants separate keys and values"
        return
    sizes = record.query.shape[-1], value_head_dim(record)
    if not set(sizes) <= set(HEAD_DIMS):
        names = f"{HEAD_DIMS[0]} or {HEAD_DIMS[1]}"
        yield f"head dimensions are {sizes[0]} of keys and {sizes[1]} of values; the kernel wants {names}"
    caches = {x.dtype for x in (record.key_pages, record.value_pages) if x is not None}
    if caches != {record.query.dtype}:
        names = ", ".join(sorted(map(str, caches)))
        yield f"the cache has dtype {names} and the queries {record.query.dtype}; the kernel wants the same"
    slots, group = paged_cache.page_size(record), record.query.shape[1] // max(1, paged_cache.kv_heads(record))
    if group > WGMMA_M:
        yield f"there are {group} query heads per KV head; the kernel wants at most {WGMMA_M}"
    if record.block_tables is not None and not (
        slots % KEYS_PER_STEP == 0 or (KEYS_PER_STEP % slots == 0 and slots >= SWIZZLE_ATOM_ROWS)
    ):
        yield (
            f"a page has {slots} slots; the kernel wants a multiple of {KEYS_PER_STEP}, or a divisor of it of at least "
            f"{SWIZZLE_ATOM_ROWS}"
        )
    if record.block_tables is None and slots % SWIZZLE_ATOM_ROWS:
        yield f"the cache has {slots} slots per sequence; the kernel wants a multiple of {SWIZZLE_ATOM_ROWS}"
