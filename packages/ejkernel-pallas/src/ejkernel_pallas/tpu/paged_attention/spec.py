"""The compile-time constants of a paged-attention kernel: everything about a record except arrays and traced
numbers.

A cache is stored in rows of elements. A token has as many rows as heads, or twice as many if keys and values are
together. Elements of less than 32 bits share words with those of the next rows, so a strided load of word rows reads
`packing` heads at once. `Cache` describes the layout.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.arithmetic import cdiv
from ejkernel.families.paged_attention import PagedAttention, band
from ejkernel.families.paged_attention import pages as paged_cache
from ejkernel.ops.device import current_device
from ejkernel.planning.precision import product_precision
from ejkernel_pallas.tpu.generations import is_v7x, is_wide
from ejkernel_pallas.tpu.mosaic.vectors import LANES

TILE = 8
"""Sublanes: rows of 32-bit words in one tile of memory."""
SMALL_PRODUCT_ROWS, LARGE_PRODUCT_ROWS = 128, 1024
"""The largest numbers of query rows per product: where pairs are masked or tokens few, and elsewhere."""
KEYS_PER_PART, KEYS_PER_CHUNK, DEFAULT_BLOCK_KEYS = 256, 512, 1024
"""Numbers of keys: per product of many rows, per product of few rows, and of all products of a decode step together."""
LATENT_PART, LATENT_STEP = 512, 4
"""Keys per product of latent rows, and products per decode step. The accumulator of 512 columns is rescaled once per
product, so products of many rows take more keys than elsewhere; docs/lab/tpu_kernels.md has the estimates.
"""
PREFETCH = 2
"""Number of pipeline stages beyond the block being computed: how many blocks' copies are in flight at the same time."""
MAX_KEYS_AT_ONCE = 128
"""The largest number of copies that are started without a loop; the code grows with it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cache:
    """The layout of keys and values in memory.

    Attributes:
        layout: The letters of the caches' layout in `paged_cache.LAYOUTS`.
        lanes: Whether a key and its value share a row of lanes, with the value in the second half.
        slots: S, slots per page.
        words: Word rows per token in each cache; 1 in head-major layouts.
        packing: Elements per word; 1 in head-major layouts, where the rows of a head are consecutive tokens.
        size: Elements per row.
        groups: Groups of 128 lanes that a row is copied in.
        latent: Whether a token has a single row, whose first elements are also its value. A word then contains several
            tokens.
        transposed: Whether a page is stored as [D, S], with tokens along lanes; see `along_lanes`.
        rotary: Elements per key in a second cache, stored as [Dr, S], beside latent rows; 0 without one.
    """

    layout: str
    lanes: bool
    slots: int
    words: int
    packing: int
    size: int
    groups: int
    latent: bool = False
    transposed: bool = False
    rotary: int = 0

    def in_columns(self, second: bool) -> bool:
        """Returns whether the first or the second cache is stored with tokens along lanes."""
        return self.rotary > 0 if second else self.transposed

    @property
    def head_major(self) -> bool:
        """Returns whether a page has its tokens' rows head by head."""
        return self.layout in ("phsd", "hpsd")

    @property
    def combined(self) -> bool:
        """Returns whether one array contains keys and values."""
        return self.layout == paged_cache.COMBINED

    @property
    def interleaved(self) -> bool:
        """Returns whether rows of keys and of values alternate."""
        return self.combined and not self.lanes

    @property
    def heads_per_unit(self) -> int:
        """Returns the number of KV heads in one row of words, or in one pair of such rows."""
        if self.latent:
            return 1
        return max(1, self.packing // 2) if self.interleaved else self.packing

    @property
    def head_groups(self) -> int:
        """Returns the number of groups of a token's word rows, one memory tile each; 1 if a token is less than a
        tile.
        """
        return self.words // TILE if self.words % TILE == 0 else 1

    @property
    def heads_per_group(self) -> int:
        """Returns the number of KV heads per head group."""
        units = self.words // 2 if self.interleaved and self.packing == 1 else self.words
        return units // self.head_groups * self.heads_per_unit

    @property
    def can_share_products(self) -> bool:
        """Returns whether several heads can share a product: the number of word rows is a power of two, and K and V
        do not alternate.
        """
        words = self.words // self.head_groups
        alone = self.head_major or self.latent or (self.interleaved and self.packing == 1)
        return not alone and words & (words - 1) == 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedSpec:
    """The compile-time constants of a kernel.

    Attributes:
        group_size: Query heads per KV head, each a row of the products; if heads share products, of `heads_per_product`
            KV heads together.
        heads_per_product: KV heads whose keys share one product; a mask leaves each query only the keys of its own
            head. With few rows, loading the MXU costs more than multiplying, and heads that share words in memory then
            need not be extracted from them.
        kv_heads: KV heads in units of `heads_per_product`, including those that pad the last word.
        head_dim: D in the products, padded.
        value_dim: Dv in the products, padded.
        tokens: Query tokens per tile: a multiple of `token_align`, or 1 if each sequence has one token.
        token_align: Every sequence has a multiple of this number of tokens in the packed queries.
        rows: Query rows per KV head and tile; a multiple of `row_align`.
        row_align: Query rows per copy.
        small_rows: Query rows per KV head in the smallest product.
        row_chunk: Query rows per product of a large tile where pairs are masked or tokens few; divides `rows`.
        row_block: Query rows per product of a large tile elsewhere; divides `rows`.
        part_kv: Keys per product of a large tile; divides `chunk_kv`.
        block_kv: Keys that are copied together.
        chunk_kv: Keys per product of few rows; divides `block_kv`.
        chunks_per_step: Chunks whose products are computed together.
        lookahead: Products of few rows whose scores are computed before the softmax of the first of them.
        masked_lookahead: The same where some keys are masked.
        keeps_limits: Whether the mask of each row's own head is kept in scratch memory, where heads share products.
            There are few mask registers, and a mask that is live during a whole block would be spilled.
        copies_per_slice: Copies of the prefetched block that are started together while a block is computed.
        entries: Pages per sequence in the table.
        cache: Layout of keys and values.
        operand: Dtype of queries and keys in products.
        weights: Dtype of weights and values in products.
        rounded: Whether keys and values are rounded to bfloat16 first.
        precision: Precision of the matrix products.
        scale: Factor on the scores.
        soft_cap: Soft cap, or None.
        left: Band: `-left <= k - p`; None is open.
        right: Band: `k - p <= right`; None is open.
        attention_chunk: Positions per chunk of chunked attention, whose queries and keys attend within their chunk
            alone; None without chunks.
        has_slopes: Whether scores have ALiBi's term.
        value_scale: Factor on the output.
        parts: Independent parts of the work list, for the cores of a chip.
    """

    group_size: int
    heads_per_product: int
    kv_heads: int
    head_dim: int
    value_dim: int
    tokens: int
    token_align: int
    rows: int
    row_align: int
    small_rows: int
    row_chunk: int
    row_block: int
    part_kv: int
    block_kv: int
    chunk_kv: int
    chunks_per_step: int
    lookahead: int
    masked_lookahead: int
    keeps_limits: bool
    copies_per_slice: int
    entries: int
    cache: Cache
    operand: Any
    weights: Any
    rounded: bool
    precision: lax.Precision | None
    scale: float
    soft_cap: float | None
    left: int | None
    right: int | None
    attention_chunk: int | None
    has_slopes: bool
    value_scale: float
    parts: int

    @property
    def heads(self) -> int:
        """Returns the number of query heads, including those of KV heads that only pad a word."""
        return self.kv_heads * self.group_size

    @property
    def bounds_last(self) -> bool:
        """Returns whether a key has a last token that attends it."""
        return self.left is not None or self.attention_chunk is not None

    @property
    def pages(self) -> int:
        """Returns the number of pages that are copied together."""
        return self.block_kv // self.cache.slots

    @property
    def copy_slices(self) -> int:
        """Returns in how many slices the prefetched block's copies are started while a block is computed; 0 if
        before it.

        Slices are used if a block is one step of products and all items have one token.
        """
        if self.cache.latent:  # loads of latent rows have no slices between which copies could be started
            return 0
        copies = self.pages * (1 if self.cache.combined else 2) * self.cache.groups
        once = self.chunk_kv * self.chunks_per_step == self.block_kv and self.cache.head_groups == 1
        return cdiv(copies, self.copies_per_slice) if self.tokens == 1 and once and copies <= MAX_KEYS_AT_ONCE else 0

    @property
    def whole_blocks(self) -> bool:
        """Returns whether a block that needs no mask is computed in one step; others are computed in two halves."""
        once = self.tokens == 1 and self.chunk_kv * self.chunks_per_step == self.block_kv
        return self.copy_slices > 0 or (self.cache.latent and once)


@dataclasses.dataclass(frozen=True)
class PagedTiles:
    """The tiles of a configuration: query tokens, keys, and parts of the work list."""

    queries: int
    keys: int
    parts: int


def shares_products(record: PagedAttention) -> bool:
    """Returns whether keys of several heads share one product if every sequence has one query."""
    return make_cache(record).can_share_products and _operand(record).itemsize == 2


def stored(record: PagedAttention) -> tuple[jax.Array, ...]:
    """Returns the caches in the shapes in which callers store them, so that nothing is copied: one array, or keys
    and values.
    """
    pages = record.key_pages
    if record.latent is not None:
        if record.kv_layout != paged_cache.LATENT:
            both = (x for x in (pages, record.value_pages) if x is not None)
            return tuple(_columns(record, x) if along_lanes(x.shape[-1]) else x for x in both)
        pack = paged_cache.packing(pages.dtype)
        return (pages.reshape(pages.shape[0], -1, pack, pages.shape[-1]),)
    if record.kv_layout != paged_cache.COMBINED:
        assert record.value_pages is not None  # the layout has separate values
        return pages, record.value_pages
    count, slots, heads, _, size = pages.shape
    if record.new_keys is None:
        return (pages.reshape(count, slots, heads * 2, size),)
    pack, lanes = paged_cache.packing(pages.dtype), max(size, LANES)
    return (pages.reshape(count, slots, -1, pack, lanes),)


def along_lanes(size: int) -> bool:
    """Returns whether a dense latent cache [B, T, D] with D = `size` is read as [B, D, T], which is how XLA stores
    it.

    By default XLA chooses the order of axes with the least padding. Rows of 576 elements would be padded to 640 lanes;
    columns of 576 are whole tiles of 8 sublanes. If the kernel required rows, XLA would copy the cache in every call.
    """
    return cdiv(size, TILE) * TILE < cdiv(size, LANES) * LANES


def _columns(record: PagedAttention, pages: jax.Array) -> jax.Array:
    """Returns the pages of a dense cache, which are consecutive, as [B, D, T], without a copy by XLA."""
    assert record.block_tables is not None  # a dense cache has been cut into pages before
    rows = pages.reshape(record.block_tables.shape[0], -1, pages.shape[-1])
    return rows.swapaxes(1, 2)


def in_lanes(record: PagedAttention) -> bool:
    """Returns whether a head's key and value share a row, in a cache that new tokens are written to."""
    written = record.kv_layout == paged_cache.COMBINED and record.new_keys is not None
    return written and record.key_pages.shape[-1] < LANES


def token_rows(record: PagedAttention) -> int:
    """Returns the number of rows per token in an array of keys, or of keys and values."""
    heads = record.key_pages.shape[record.kv_layout.index("h")]
    return heads * 2 if record.kv_layout == paged_cache.COMBINED and not in_lanes(record) else heads


def make_cache(record: PagedAttention) -> Cache:
    """Returns the layout of a record's cache; the result is meaningful if `reasons` yields none."""
    letters, pages = record.kv_layout, record.key_pages
    pack, size, slots = paged_cache.packing(pages.dtype), pages.shape[-1], paged_cache.page_size(record)
    latent = record.latent is not None
    if letters in ("phsd", "hpsd"):
        return Cache(
            layout=letters,
            lanes=False,
            slots=slots,
            words=1,
            packing=1,
            size=size,
            groups=1,
            latent=latent,
            transposed=latent and along_lanes(size),
            rotary=record.value_pages.shape[-1] if latent and record.value_pages is not None else 0,
        )
    if latent:
        groups = size // LANES
        return Cache(
            layout=letters, lanes=False, slots=slots, words=1, packing=pack, size=size, groups=groups, latent=True
        )
    lanes = in_lanes(record)
    size = max(size, LANES) if lanes else size
    return Cache(
        layout=letters,
        lanes=lanes,
        slots=slots,
        words=max(1, token_rows(record) // pack),
        packing=pack,
        size=size,
        groups=cdiv(size, LANES),
    )


def make_spec(record: PagedAttention, sizes: PagedTiles) -> PagedSpec:
    """Returns the constants of a record's kernel with given tiles."""
    cache, group = make_cache(record), record.query.shape[1] // paged_cache.kv_heads(record)
    left, right = band(record)
    operand = _operand(record)
    single = record.query_start is None or sizes.queries == 1
    heads = cdiv(paged_cache.kv_heads(record), cache.heads_per_unit) * cache.heads_per_unit
    heads_per_product = cache.heads_per_group if single and shares_products(record) else 1
    group *= heads_per_product
    row_align = 32 // operand.itemsize
    token_align, small_rows = row_align // math.gcd(row_align, group), cdiv(group, row_align) * row_align
    tokens = 1 if single else max(1, sizes.queries // token_align) * token_align
    rows = small_rows if single else tokens * group
    block = _block(cache.slots, min(sizes.keys, paged_cache.capacity(record)))
    kind = current_device().kind
    wide, v7x = is_wide(kind), is_v7x(kind)
    chunk, chunks_per_step = _products(block, single, heads_per_product, 16 if wide else 8)
    if cache.latent and single:
        chunk = math.gcd(block, LATENT_PART)
        chunks_per_step = math.gcd(block // chunk, LATENT_STEP)
    lookahead = 5 if wide else 2
    return PagedSpec(
        group_size=group,
        heads_per_product=heads_per_product,
        kv_heads=heads // heads_per_product,
        head_dim=cache.size + cache.rotary if cache.lanes or cache.latent else record.query.shape[-1],
        value_dim=cache.size if cache.lanes else record.latent[1] if record.latent else paged_cache.value_size(record),
        tokens=tokens,
        token_align=token_align,
        rows=rows,
        row_align=row_align,
        small_rows=small_rows,
        row_chunk=max(n for n in range(row_align, max(SMALL_PRODUCT_ROWS, small_rows) + 1, row_align) if rows % n == 0),
        row_block=max(n for n in range(row_align, max(LARGE_PRODUCT_ROWS, small_rows) + 1, row_align) if rows % n == 0),
        part_kv=math.gcd(chunk, LATENT_PART if cache.latent else KEYS_PER_PART),
        block_kv=block,
        chunk_kv=chunk,
        chunks_per_step=chunks_per_step,
        # Computing scores early hides the MXU's latency, but takes registers. Where copies take longer than products,
        # or keys are few, a smaller lookahead costs nothing.
        lookahead=2 if heads_per_product > 1 and not v7x else lookahead,
        masked_lookahead=min(lookahead, 4) if heads_per_product > 1 else lookahead,
        keeps_limits=heads_per_product > 1 and v7x,
        copies_per_slice=3 if v7x else 4,
        entries=1 if record.block_tables is None else record.block_tables.shape[1],
        cache=cache,
        operand=operand,
        weights=_weights(record),
        rounded=record.compute_dtype is not None and operand.itemsize < record.key_pages.dtype.itemsize,
        precision=_precision(record),
        scale=record.softmax_scale,
        soft_cap=record.logits_soft_cap,
        left=left,
        right=right,
        attention_chunk=record.chunk_size,
        has_slopes=record.alibi_slopes is not None,
        value_scale=record.value_scale,
        parts=sizes.parts,
    )


def _products(block: int, single: bool, heads_per_product: int, most: int) -> tuple[int, int]:
    """Returns keys per product, and products per step: at most `most`, the number that registers hold."""
    if heads_per_product == 1:
        return math.gcd(block, DEFAULT_BLOCK_KEYS if single else KEYS_PER_CHUNK), 1
    chunk = math.gcd(block, DEFAULT_BLOCK_KEYS // most)
    return chunk, math.gcd(block // chunk, most)


def _block(slots: int, keys: int) -> int:
    """Returns a number of keys that is whole pages and whole lanes, and at least the requested one where possible."""
    step = math.lcm(slots, LANES)
    return max(1, cdiv(keys, step)) * step


def _weights(record: PagedAttention) -> Any:
    """Returns the wider dtype of queries and cache; 8-bit caches are converted to the query's dtype."""
    query, cache = record.query.dtype, record.key_pages.dtype
    return jnp.dtype(query if cache.itemsize == 1 else jnp.promote_types(query, cache))


def _operand(record: PagedAttention) -> Any:
    return _weights(record) if record.compute_dtype is None else jnp.dtype(record.compute_dtype)


def _precision(record: PagedAttention) -> lax.Precision | None:
    """Returns the nearest precision that Mosaic has: products in one bfloat16 pass or in six."""
    asked = product_precision(_weights(record))
    return lax.Precision.HIGHEST if asked == lax.Precision.HIGH else asked
