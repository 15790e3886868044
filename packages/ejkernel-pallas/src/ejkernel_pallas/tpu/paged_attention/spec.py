"""What a paged-attention kernel is compiled for: all about a record that is neither an array nor a traced number.

A cache lies in memory in rows of numbers, as many rows a token as it has heads, or twice as many where keys and values
are together. Numbers of less than 32 bits share words with those of the next rows, so a kernel that reads every so
many-th row of words gets the rows of `packing` heads at once. `Cache` says where they are.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.families.paged_attention import PagedAttention, band
from ejkernel.ops.device import current_device
from ejkernel.planning import paged_cache
from ejkernel.planning.precision import product_precision
from ejkernel_pallas.tpu.generations import is_v7x, is_wide
from ejkernel_pallas.tpu.mosaic.vectors import LANES

LOG2E = math.log2(math.e)
TILE = 8
"""Rows of words in a tile of memory."""

ROWS, LARGE = 128, 1024
"""Most query rows of one product: where pairs are masked or tokens few, and elsewhere."""

PART, CHUNK, KEYS = 256, 512, 1024
"""Keys of one product of many rows, of few, and of all products of a sequence's only row that are made together."""

AHEAD = 2
"""Blocks whose copies are on their way while one is computed with."""

AT_ONCE = 128
"""Most copies that are started without a loop."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cache:
    """Where keys and values are.

    Attributes:
        layout: `paged_cache.LAYOUTS`' letters of the caches.
        lanes: Whether keys and values share rows, the latter in their second half.
        slots: S, of a page.
        words: Rows of words of a token, in each cache; 1 where heads come first.
        packing: Numbers in a word; 1 where heads come first, whose rows are those of tokens.
        size: Numbers in a row.
        groups: Parts of 128 lanes that a row is copied in.
    """

    layout: str
    lanes: bool
    slots: int
    words: int
    packing: int
    size: int
    groups: int

    @property
    def head_major(self) -> bool:
        """Whether a page has its tokens' rows head by head."""
        return self.layout in ("phsd", "hpsd")

    @property
    def combined(self) -> bool:
        """Whether one array has keys and values."""
        return self.layout == paged_cache.COMBINED

    @property
    def alternates(self) -> bool:
        """Whether rows are keys and values in turn."""
        return self.combined and not self.lanes

    @property
    def heads_per_unit(self) -> int:
        """KV heads that one row of words has, or one pair of such rows."""
        return max(1, self.packing // 2) if self.alternates else self.packing

    @property
    def turns(self) -> int:
        """Groups of the rows of words of a token that are in one tile of memory each; 1 where there are no tiles."""
        return self.words // TILE if self.words % TILE == 0 else 1

    @property
    def heads_per_turn(self) -> int:
        """KV heads of such a group."""
        units = self.words // 2 if self.alternates and self.packing == 1 else self.words
        return units // self.turns * self.heads_per_unit

    @property
    def joins(self) -> bool:
        """Whether rows of several heads can be taken together: keys and values do not alternate, nor do lanes end."""
        words = self.words // self.turns
        return not (self.head_major or (self.alternates and self.packing == 1)) and words & (words - 1) == 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """Constants of a kernel.

    Attributes:
        group: Query heads a KV head, each a row of the products; of all KV heads that are joined.
        joined: KV heads whose keys are taken together, by queries that attend those of one: where products have few
            rows, what they take in costs more than what they do, and rows of several heads need not be taken apart.
        kv_heads: KV heads, or groups of joined ones, with those that fill up the last word.
        size: D as the products have it.
        value_size: Dv as the products have it.
        tokens: Query tokens a tile; a multiple of `step`, or 1 where sequences have one each.
        step: Tokens of which every sequence has a multiple in the packed queries.
        rows: Query rows a KV head a tile; a multiple of `grain`.
        grain: Query rows of a copy.
        few: Query rows a KV head of the smallest product.
        row_chunk: Query rows a product of a large tile where pairs are masked or tokens few; divides `rows`.
        row_block: Query rows a product of a large tile elsewhere; divides `rows`.
        part: Keys a product of a large tile; divides `chunk`.
        block: Keys that are copied at once.
        chunk: Keys a product of few rows; divides `block`.
        rounds: Chunks whose products are made together.
        lead: Products of few rows whose scores are made ahead of the next that is finished.
        masked_lead: The same where some keys are not attended.
        limits: Whether which keys are a row's own head's is written down, where heads are joined: few registers hold
            masks, and one that is kept in them all along a block is spilled.
        started: Copies of a block ahead that are started at once while a block is computed with.
        entries: Pages of a sequence in the table.
        cache: Where keys are.
        operand: Dtype in which queries meet keys.
        weights: Dtype in which weights meet values.
        rounded: Whether keys and values are rounded to bfloat16 first.
        precision: Of the matrix products.
        scale: Factor on the scores.
        cap: Soft cap, or None.
        left: Band: `-left <= k - p`; None is open.
        right: Band: `k - p <= right`; None is open.
        value_scale: Factor on the output.
        parts: Independent parts of the work, for the cores of a chip.
    """

    group: int
    joined: int
    kv_heads: int
    size: int
    value_size: int
    tokens: int
    step: int
    rows: int
    grain: int
    few: int
    row_chunk: int
    row_block: int
    part: int
    block: int
    chunk: int
    rounds: int
    lead: int
    masked_lead: int
    limits: bool
    started: int
    entries: int
    cache: Cache
    operand: Any
    weights: Any
    rounded: bool
    precision: lax.Precision | None
    scale: float
    cap: float | None
    left: int | None
    right: int | None
    value_scale: float
    parts: int

    @property
    def heads(self) -> int:
        """Query heads, with those of KV heads that only fill up a word."""
        return self.kv_heads * self.group

    @property
    def pages(self) -> int:
        """Pages that are copied at once."""
        return self.block // self.cache.slots

    @property
    def pieces(self) -> int:
        """In how many parts the copies of a block ahead are started while a block is computed with; 0 for not at all.

        That is where a block is computed with at one go, by items that all have one token.
        """
        copies = self.pages * (1 if self.cache.combined else 2) * self.cache.groups
        once = self.chunk * self.rounds == self.block and self.cache.turns == 1
        return -(-copies // self.started) if self.tokens == 1 and once and copies <= AT_ONCE else 0


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What tiles are asked for: query tokens and keys, and parts of the work."""

    queries: int
    keys: int
    parts: int


def joins_heads(record: PagedAttention) -> bool:
    """Whether keys of several heads are taken together where every sequence has one query."""
    return make_cache(record).joins and _operand(record).itemsize == 2


def stored(record: PagedAttention) -> tuple[jax.Array, ...]:
    """The caches in the shapes in which callers keep them, so that nothing is copied: one, or keys and values."""
    pages = record.key_pages
    if record.kv_layout != paged_cache.COMBINED:
        assert record.value_pages is not None  # as the layout says
        return pages, record.value_pages
    count, slots, heads, _, size = pages.shape
    if record.new_keys is None:
        return (pages.reshape(count, slots, heads * 2, size),)
    pack, lanes = paged_cache.packing(pages.dtype), max(size, LANES)
    return (pages.reshape(count, slots, -1, pack, lanes),)


def in_lanes(record: PagedAttention) -> bool:
    """Whether a head's key and value share a row, in a cache that new tokens are written to."""
    written = record.kv_layout == paged_cache.COMBINED and record.new_keys is not None
    return written and record.key_pages.shape[-1] < LANES


def token_rows(record: PagedAttention) -> int:
    """Rows of a token in an array of keys, or of keys and values."""
    heads = record.key_pages.shape[record.kv_layout.index("h")]
    return heads * 2 if record.kv_layout == paged_cache.COMBINED and not in_lanes(record) else heads


def make_cache(record: PagedAttention) -> Cache:
    """Where the keys of a record are; meaningful where `reasons` has none."""
    letters, pages = record.kv_layout, record.key_pages
    pack, size, slots = paged_cache.packing(pages.dtype), pages.shape[-1], paged_cache.page_size(record)
    if letters in ("phsd", "hpsd"):
        return Cache(layout=letters, lanes=False, slots=slots, words=1, packing=1, size=size, groups=1)
    lanes = in_lanes(record)
    size = max(size, LANES) if lanes else size
    return Cache(
        layout=letters,
        lanes=lanes,
        slots=slots,
        words=max(1, token_rows(record) // pack),
        packing=pack,
        size=size,
        groups=-(-size // LANES),
    )


def make_spec(record: PagedAttention, sizes: Sizes) -> Spec:
    """The constants of a record's kernel with given tiles."""
    cache, group = make_cache(record), record.query.shape[1] // paged_cache.kv_heads(record)
    left, right = band(record)
    operand = _operand(record)
    single = record.query_start is None or sizes.queries == 1
    heads = -(-paged_cache.kv_heads(record) // cache.heads_per_unit) * cache.heads_per_unit
    joined = cache.heads_per_turn if single and joins_heads(record) else 1
    group *= joined
    grain = 32 // operand.itemsize
    step, few = grain // math.gcd(grain, group), -(-group // grain) * grain
    tokens = 1 if single else max(1, sizes.queries // step) * step
    rows = few if single else tokens * group
    block = _block(cache.slots, min(sizes.keys, paged_cache.capacity(record)))
    kind = current_device().kind
    wide, fast = is_wide(kind), is_v7x(kind)
    chunk, rounds = _products(block, single, joined, 16 if wide else 8)
    lead = 5 if wide else 2
    return Spec(
        group=group,
        joined=joined,
        kv_heads=heads // joined,
        size=cache.size if cache.lanes else record.query.shape[-1],
        value_size=cache.size if cache.lanes else paged_cache.value_size(record),
        tokens=tokens,
        step=step,
        rows=rows,
        grain=grain,
        few=few,
        row_chunk=max(n for n in range(grain, max(ROWS, few) + 1, grain) if rows % n == 0),
        row_block=max(n for n in range(grain, max(LARGE, few) + 1, grain) if rows % n == 0),
        part=math.gcd(chunk, PART),
        block=block,
        chunk=chunk,
        rounds=rounds,
        # Where copies take longer, or keys are few, what registers hold is enough.
        lead=2 if joined > 1 and not fast else lead,
        masked_lead=min(lead, 4) if joined > 1 else lead,
        limits=joined > 1 and fast,
        started=3 if fast else 4,
        entries=1 if record.block_tables is None else record.block_tables.shape[1],
        cache=cache,
        operand=operand,
        weights=_weights(record),
        rounded=record.compute_dtype is not None and operand.itemsize < record.key_pages.dtype.itemsize,
        precision=_precision(record),
        scale=record.softmax_scale,
        cap=record.logits_soft_cap,
        left=left,
        right=right,
        value_scale=record.value_scale,
        parts=sizes.parts,
    )


def _products(block: int, single: bool, joined: int, most: int) -> tuple[int, int]:
    """Keys of a product, and how many products are made together: at most so many, which is what registers hold."""
    if joined == 1:
        return math.gcd(block, KEYS if single else CHUNK), 1
    chunk = math.gcd(block, KEYS // most)
    return chunk, math.gcd(block // chunk, most)


def _block(slots: int, keys: int) -> int:
    """Keys of whole pages and whole lanes, at least as many as asked for where that is possible."""
    step = math.lcm(slots, LANES)
    return max(1, -(-keys // step)) * step


def _weights(record: PagedAttention) -> Any:
    """The wider of queries and cache; caches of 8 bits are read in the query's."""
    query, kept = record.query.dtype, record.key_pages.dtype
    return jnp.dtype(query if kept.itemsize == 1 else jnp.promote_types(query, kept))


def _operand(record: PagedAttention) -> Any:
    return _weights(record) if record.compute_dtype is None else jnp.dtype(record.compute_dtype)


def _precision(record: PagedAttention) -> lax.Precision | None:
    """Mosaic has products in one pass of bfloat16 and in six."""
    asked = product_precision(_weights(record))
    return lax.Precision.HIGHEST if asked == lax.Precision.HIGH else asked
