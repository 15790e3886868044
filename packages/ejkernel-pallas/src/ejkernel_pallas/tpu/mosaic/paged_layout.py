"""The layout of a paged cache in memory.

A cache is stored in rows of elements. A token has as many rows as heads, or twice as many if keys and values are
together. Elements of less than 32 bits share words with those of the next rows, so a strided load of word rows reads
`packing` heads at once.
"""

import dataclasses
import math

import jax

from ejkernel.arithmetic import cdiv
from ejkernel.families.paged_attention import PagedAttention
from ejkernel.families.paged_attention import pages as paged_cache
from ejkernel_pallas.tpu.mosaic.code_rows import CodeFormat, CodeRows
from ejkernel_pallas.tpu.mosaic.vectors import LANES

MEMORY_TILE_ROWS = 8
"""Sublanes: rows of 32-bit words in one tile of memory."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheLayout:
    """The layout of keys and values in memory.

    Attributes:
        layout: The letters of the caches' layout in `paged_cache.LAYOUTS`.
        key_and_value_share_lanes: Whether a key and its value share a row of lanes, with the value in the second half.
        slots_per_page: S, tokens that a page has room for.
        word_rows_per_token: Rows of 32-bit words per token in each cache; 1 in head-major layouts.
        elements_per_word: Elements per word; 1 in head-major layouts, where the rows of a head are consecutive tokens.
        elements_per_row: Elements per row.
        num_lane_groups: Groups of 128 lanes that a row is copied in.
        is_latent: Whether a token has a single row, whose first elements are also its value. A word then contains
            several tokens.
        tokens_along_lanes: Whether a page is stored as [D, S], with tokens along lanes; see
            `stores_tokens_along_lanes`.
        rotary_dim: Elements per key in a second cache, stored as [Dr, S], next to latent rows; 0 without one.
        codes: TurboQuant's codes, whose pages are stored as [Hk, bytes, S]; None in a cache of numbers.
    """

    layout: str
    key_and_value_share_lanes: bool
    slots_per_page: int
    word_rows_per_token: int
    elements_per_word: int
    elements_per_row: int
    num_lane_groups: int
    is_latent: bool = False
    tokens_along_lanes: bool = False
    rotary_dim: int = 0
    codes: CodeFormat | None = None

    def has_tokens_along_lanes(self, is_second_cache: bool) -> bool:
        """Returns whether the first or the second cache is stored with tokens along lanes."""
        return self.rotary_dim > 0 if is_second_cache and self.codes is None else self.tokens_along_lanes

    @property
    def is_head_major(self) -> bool:
        """Returns whether a page has its tokens' rows head by head."""
        return self.layout in ("phsd", "hpsd")

    @property
    def has_combined_keys_and_values(self) -> bool:
        """Returns whether one array contains keys and values."""
        return self.layout == paged_cache.COMBINED_LAYOUT

    @property
    def interleaves_keys_and_values(self) -> bool:
        """Returns whether rows of keys and of values alternate."""
        return self.has_combined_keys_and_values and not self.key_and_value_share_lanes

    @property
    def kv_heads_per_word_row(self) -> int:
        """Returns the number of KV heads in one row of words, or in one pair of such rows."""
        if self.is_latent:
            return 1
        return max(1, self.elements_per_word // 2) if self.interleaves_keys_and_values else self.elements_per_word

    @property
    def num_head_groups(self) -> int:
        """Returns the number of groups of a token's word rows, one memory tile each; 1 if a token is less than a
        tile.
        """
        return self.word_rows_per_token // MEMORY_TILE_ROWS if self.word_rows_per_token % MEMORY_TILE_ROWS == 0 else 1

    @property
    def kv_heads_per_group(self) -> int:
        """Returns the number of KV heads per head group."""
        units = (
            self.word_rows_per_token // 2
            if self.interleaves_keys_and_values and self.elements_per_word == 1
            else self.word_rows_per_token
        )
        return units // self.num_head_groups * self.kv_heads_per_word_row

    @property
    def kv_heads_can_share_products(self) -> bool:
        """Returns whether several KV heads can share a product: the number of word rows is a power of two, and K and V
        do not alternate.
        """
        words = self.word_rows_per_token // self.num_head_groups
        alone = (
            self.is_head_major
            or self.is_latent
            or self.codes is not None
            or (self.interleaves_keys_and_values and self.elements_per_word == 1)
        )
        return not alone and words & (words - 1) == 0


def caches_as_stored(record: PagedAttention) -> tuple[jax.Array, ...]:
    """Returns the caches in the shapes in which callers store them, so that nothing is copied: one array, or keys
    and values.
    """
    pages = record.key_pages
    if record.latent is not None:
        if record.kv_layout != paged_cache.LATENT_LAYOUT:
            both = (x for x in (pages, record.value_pages) if x is not None)
            return tuple(
                _pages_with_tokens_along_lanes(record, x) if stores_tokens_along_lanes(x.shape[-1]) else x for x in both
            )
        pack = paged_cache.values_per_32_bits(pages.dtype)
        return (pages.reshape(pages.shape[0], -1, pack, pages.shape[-1]),)
    if record.kv_layout != paged_cache.COMBINED_LAYOUT:
        assert record.value_pages is not None  # the layout has separate values
        return pages, record.value_pages
    count, slots, heads, _, size = pages.shape
    if record.new_keys is None:
        return (pages.reshape(count, slots, heads * 2, size),)
    pack, lanes = paged_cache.values_per_32_bits(pages.dtype), max(size, LANES)
    return (pages.reshape(count, slots, -1, pack, lanes),)


def caches_by_ref_name(record: PagedAttention) -> dict[str, jax.Array]:
    """Returns the caches in the shapes in which they are stored, by the names of the kernel's refs.

    Codes are as XLA stores them if pages have multiples of 128 slots: [P, Hk, bytes, S], and the values' norms
    [P, Hk, S].
    """
    if record.code_bits is None:
        caches = caches_as_stored(record)
        return {name: x for name, x in zip(("keys", "values"), caches, strict=False)}
    names = ("key_pages", "value_pages", "key_signs", "key_norms", "value_norms")
    arrays = {name.replace("_pages", "s"): getattr(record, name) for name in names}
    return {name: x.transpose(0, *range(2, x.ndim), 1) for name, x in arrays.items() if x is not None}


def make_code_format(record: PagedAttention) -> CodeFormat:
    """Returns the codes of a record's cache."""
    assert record.code_bits is not None  # the cache has codes
    assert record.value_pages is not None  # and values of their own
    size = record.key_pages.shape[-1] * 8 // record.code_bits[0]
    values = record.value_pages.shape[-1] * 8 // record.code_bits[1]
    signs = None
    if record.key_signs is not None:
        signs = CodeRows(1, record.key_signs.shape[-1] * 8, packs_halves=record.query.dtype.itemsize == 2)
    keys = CodeRows(record.code_bits[0], size)
    return CodeFormat(keys, CodeRows(record.code_bits[1], values), signs, cdiv(size, LANES) * LANES)


def stores_tokens_along_lanes(size: int) -> bool:
    """Returns whether a dense latent cache [B, T, D] with D = `size` is read as [B, D, T], which is how XLA stores
    it.

    By default XLA chooses the order of axes with the least padding. Rows of 576 elements would be padded to 640 lanes;
    columns of 576 are whole tiles of 8 sublanes. If the kernel required rows, XLA would copy the cache in every call.
    """
    return cdiv(size, MEMORY_TILE_ROWS) * MEMORY_TILE_ROWS < cdiv(size, LANES) * LANES


def _pages_with_tokens_along_lanes(record: PagedAttention, pages: jax.Array) -> jax.Array:
    """Returns the pages of a dense cache, which are consecutive, as [B, D, T], without a copy by XLA."""
    assert record.block_tables is not None  # a dense cache has been cut into pages before
    rows = pages.reshape(record.block_tables.shape[0], -1, pages.shape[-1])
    return rows.swapaxes(1, 2)


def key_and_value_share_row(record: PagedAttention) -> bool:
    """Returns whether a head's key and value share a row, in a cache that new tokens are written to."""
    written = record.kv_layout == paged_cache.COMBINED_LAYOUT and record.new_keys is not None
    return written and record.key_pages.shape[-1] < LANES


def rows_per_token(record: PagedAttention) -> int:
    """Returns the number of rows per token in an array of keys, or of keys and values."""
    heads = record.key_pages.shape[record.kv_layout.index("h")]
    return (
        heads * 2 if record.kv_layout == paged_cache.COMBINED_LAYOUT and not key_and_value_share_row(record) else heads
    )


def make_cache_layout(record: PagedAttention) -> CacheLayout:
    """Returns the layout of a record's cache; the result is meaningful if `refusal_reasons` yields none."""
    letters, pages = record.kv_layout, record.key_pages
    pack, size, slots = paged_cache.values_per_32_bits(pages.dtype), pages.shape[-1], paged_cache.page_size(record)
    latent = record.latent is not None
    if letters in ("phsd", "hpsd") or record.code_bits is not None:
        return CacheLayout(
            layout=letters,
            key_and_value_share_lanes=False,
            slots_per_page=slots,
            word_rows_per_token=1,
            elements_per_word=1,
            elements_per_row=size,
            num_lane_groups=1,
            is_latent=latent,
            tokens_along_lanes=record.code_bits is not None or (latent and stores_tokens_along_lanes(size)),
            rotary_dim=record.value_pages.shape[-1] if latent and record.value_pages is not None else 0,
            codes=None if record.code_bits is None else make_code_format(record),
        )
    if latent:
        return CacheLayout(
            layout=letters,
            key_and_value_share_lanes=False,
            slots_per_page=slots,
            word_rows_per_token=1,
            elements_per_word=pack,
            elements_per_row=size,
            num_lane_groups=size // LANES,
            is_latent=True,
        )
    lanes = key_and_value_share_row(record)
    size = max(size, LANES) if lanes else size
    return CacheLayout(
        layout=letters,
        key_and_value_share_lanes=lanes,
        slots_per_page=slots,
        word_rows_per_token=max(1, rows_per_token(record) // pack),
        elements_per_word=pack,
        elements_per_row=size,
        num_lane_groups=cdiv(size, LANES),
    )


def product_head_dims(record: PagedAttention, cache: CacheLayout) -> tuple[int, int]:
    """Returns the columns of keys and of values, as the kernel multiplies them."""
    if cache.codes is not None:
        return cache.codes.query_columns, cache.codes.values.count
    if cache.key_and_value_share_lanes:
        return cache.elements_per_row + cache.rotary_dim, cache.elements_per_row
    value_dim = record.latent[1] if record.latent else paged_cache.value_head_dim(record)
    return cache.elements_per_row + cache.rotary_dim if cache.is_latent else record.query.shape[-1], value_dim


def whole_page_block_keys(key_multiple: int, keys: int) -> int:
    """Returns a number of keys that is whole pages and whole lanes, and at least the requested one where possible."""
    step = math.lcm(key_multiple, LANES)
    return max(1, cdiv(keys, step)) * step
