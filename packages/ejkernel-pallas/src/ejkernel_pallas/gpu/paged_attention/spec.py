"""The compile-time constants of Hopper's paged kernel, and its refusals."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp

from ejkernel.arithmetic import LOG2E, cdiv
from ejkernel.families.paged_attention import PagedAttention, causal_window_bounds
from ejkernel.families.paged_attention import pages as paged_cache
from ejkernel_pallas.gpu.hopper.sizes import ROWS_PER_WARP, SHARED_MEMORY_BYTES, WGMMA_M
from ejkernel_pallas.gpu.hopper.split_boundaries import SplitBoundaries
from ejkernel_pallas.gpu.latent_attention.spec import KEYS_PER_STEP, SWIZZLE_ATOM_ROWS
from ejkernel_pallas.gpu.paged_attention.config import HopperPaged

HEAD_DIMS = (64, 128)
"""Head dimensions of keys and of values."""
MAX_SLOT_BYTES = 2**28
"""The most memory for partial results of splits; calls that could need more have programs with whole items."""
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
        split_keys: As `HopperPaged.split_keys`.
        split_doublings: As `HopperPaged.split_doublings`.
        folds_in_launch: As `HopperPaged.folds_in_launch`.
        slots_per_segment: Slots for the splits of an item that a program begins, or continues; 0 if no item is cut.
        slot_rows: Rows of a slot: those of the tokens of an item, in whole warps.
        queries_in_place: Whether an item is a token whose query heads are read, and results written, where they are in
            the record's arrays, without copies in the kernel's order.
        heads_per_tile: Query heads per KV head.
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
    split_keys: int = 0
    split_doublings: tuple[int, ...] = ()
    folds_in_launch: bool = False
    slots_per_segment: int = 0
    slot_rows: int = WGMMA_M
    queries_in_place: bool = False
    heads_per_tile: int = 0

    @property
    def keys_per_unit(self) -> int:
        """Returns the keys of the units of which programs have equal shares: those of a short split, or of a step."""
        return self.split_keys or KEYS_PER_STEP

    @property
    def steps_per_unit(self) -> int:
        """Returns the steps per unit of splits."""
        return self.split_keys // KEYS_PER_STEP

    @property
    def splits(self) -> SplitBoundaries:
        """Returns the boundaries of splits in units."""
        return SplitBoundaries(1, tuple(keys // self.keys_per_unit for keys in self.split_doublings))

    @property
    def counts_arrivals(self) -> bool:
        """Returns whether the last program to store splits of an item folds them."""
        return self.folds_in_launch and self.slots_per_segment > 0

    @property
    def num_slots(self) -> int:
        """Returns the slots of the partial results of splits: two segments per thread block."""
        return 2 * self.num_thread_blocks * max(1, self.slots_per_segment)

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
    _check_config(params)
    tokens, _, key_dim = record.query.shape
    kv_heads, slots, value_dim = paged_cache.kv_heads(record), paged_cache.page_size(record), value_head_dim(record)
    left, right = causal_window_bounds(record)
    group = rows_per_token(record)
    slot_rows = _slot_rows(record) if params.split_keys else WGMMA_M
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
        stages=min(params.stages, _max_stages(key_dim, value_dim, slot_rows if params.split_keys else 0)),
        dtype=jnp.dtype(record.query.dtype),
        value_scale=record.value_scale,
        split_keys=params.split_keys,
        # Those past the last key have no effect, and would take launches of the plan.
        split_doublings=tuple(x for x in params.split_doublings if x < paged_cache.max_sequence_len(record)),
        folds_in_launch=params.folds_in_launch,
        slot_rows=slot_rows,
        queries_in_place=bool(params.split_keys) and _has_queries_in_place(record),
        heads_per_tile=record.query.shape[1] // kv_heads,
    )


def _slot_rows(record: PagedAttention) -> int:
    """Returns the rows of the tokens of an item, in whole warps."""
    rows = rows_per_token(record) * (1 if record.query_start is None else tokens_per_tile(record))
    return min(WGMMA_M, cdiv(rows, ROWS_PER_WARP) * ROWS_PER_WARP)


def _has_queries_in_place(record: PagedAttention) -> bool:
    """Returns whether items can be copied from the record's queries: one token per sequence, and the query heads of a
    KV head within eight rows from a multiple of eight on, or in whole eights.
    """
    tokens, heads, _ = record.query.shape
    group = heads // paged_cache.kv_heads(record)
    is_aligned = SWIZZLE_ATOM_ROWS % group == 0 or group % SWIZZLE_ATOM_ROWS == 0
    return record.query_start is None and is_aligned and tokens * heads % SWIZZLE_ATOM_ROWS == 0


def _check_config(params: HopperPaged) -> None:
    has_split_of_blocks = params.split_keys >= 0 and params.split_keys % KEYS_PER_STEP == 0
    sizes = [params.split_keys << n for n in range(len(params.split_doublings) + 1)]
    starts = zip(params.split_doublings, (0, *params.split_doublings), sizes[1:], strict=False)
    is_power = params.split_keys.bit_count() == 1
    is_aligned = is_power and all(start > before and start % size == 0 for start, before, size in starts)
    if params.split_doublings and not is_aligned:
        raise ValueError(
            f"cfg: split_doublings of {params.split_doublings}, wants increasing multiples of the keys of a split from "
            f"there on, which are a power of two"
        )
    if params.num_programs < 1 or params.stages < 1 or params.prefill_tokens < 2 or not has_split_of_blocks:
        raise ValueError(
            f"cfg: got {params}, wants num_programs and stages of at least 1, prefill_tokens of at least 2, split_keys "
            f"a multiple of {KEYS_PER_STEP}, or 0"
        )


def _max_stages(key_dim: int, value_dim: int, total_rows: int) -> int:
    """Returns the number of stages that fit after the queries, with 2 bytes per element, and the rows of the total of
    folded splits, which is float32: three for keys and values of 128, two next to a total of 64 rows.
    """
    total_bytes = 4 * total_rows * value_dim
    return (SHARED_MEMORY_BYTES - RESERVED_SMEM_BYTES - 2 * WGMMA_M * key_dim - total_bytes) // (
        2 * KEYS_PER_STEP * (key_dim + value_dim)
    )


def with_items(record: PagedAttention, spec: PagedSpec, num_items: int) -> PagedSpec:
    """Returns the constants with the items of a schedule, and slots for the splits of items that are cut.

    Args:
        record: The canonical arguments.
        spec: The constants without items.
        num_items: Items.
    """
    spec = dataclasses.replace(spec, num_items=num_items)
    if not spec.split_keys:
        return spec
    max_units = max(1, cdiv(paged_cache.max_sequence_len(record), spec.split_keys))
    max_splits = spec.splits.count(max_units)
    # A share has at most this many splits, whatever the lengths are.
    slots = min(max_splits, max(1, cdiv(num_items * max_units, spec.programs_per_kv_head)))
    cut = dataclasses.replace(spec, slots_per_segment=slots)
    slot_bytes = cut.num_slots * cut.slot_rows * spec.value_dim * 4
    return cut if max_splits > 1 and slot_bytes <= MAX_SLOT_BYTES else spec


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
