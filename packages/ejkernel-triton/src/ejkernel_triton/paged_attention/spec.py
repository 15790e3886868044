"""The compile-time constants of the paged-attention kernels."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.arithmetic import LOG2E
from ejkernel.families.paged_attention import PagedAttention, band
from ejkernel.families.paged_attention import pages as paged_cache
from ejkernel.families.paged_attention.latent_pages import Rotary
from ejkernel.ops.chips import gpu_of
from ejkernel.ops.device import current_device
from ejkernel_triton.launch import interpreting
from ejkernel_triton.paged_attention.config import PREFILL_SCORE_ROWS, PagedForward, group_of, partial_stages
from ejkernel_triton.sizes import (
    padded_for_dot,
)

Strides = tuple[int, int, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedSpec:
    """Constants of the kernels; the letters are those of the record.

    Attributes:
        ROWS: T, query rows of the call.
        SEQUENCES: N.
        H: Query heads.
        HK: KV heads.
        SPLITS: Tiles that the query heads of a KV head are split into; a program has one of them.
        G: Query heads per such tile.
        D: Head dimension of queries and keys.
        DV: Head dimension of values.
        BD: Columns of a tile of keys: D or, in a latent cache, R, padded to a power of two of at least 16.
        LATENT: R of a latent cache, whose tiles of keys are also its tiles of values; 0 for others.
        ROTARY: Key columns in addition to those of the latent vector; they are in the array of values.
        BR: ROTARY, padded to a power of two of at least 16.
        TAIL: Whether these columns are values too, after those of the latent vector.
        BV: DV, padded to a power of two of at least 16.
        PAGES: Pages of the cache.
        PAGE_SIZE: Slots per page.
        TABLE: Entries per sequence of the block table; 0 if sequence n has page n.
        KEY_STRIDES: Strides of the keys' pages, slots and heads, in elements.
        VALUE_STRIDES: The same for the values.
        KEY_ELEMENTS: Elements of one batch row's key cache.
        VALUE_ELEMENTS: The same of its value cache.
        VALUE_OFFSET: Offset of the values in a combined cache, or of rotary columns in a latent one; else 0.
        BLOCK_Q: Query rows per tile.
        M: Rows of a tile of scores: BLOCK_Q query rows times G heads, padded to a power of two.
        BLOCK_KV: Keys per tile.
        WHOLE: Whether a tile is within one page, whose index it loads once.
        FULL_TILES: Whether full tiles have a separate loop without masks.
        ENTRIES: Entries of the work list.
        CAPACITY: Tokens of the longest sequence that the tables can describe.
        PACKED: Whether sequences have any number of query rows, instead of one each.
        COUNTED: Whether `num_seqs` has the number of live sequences.
        STARTED: Whether `kv_starts` has the sequences' first keys.
        PROGRAMS: Persistent programs that share the key tiles.
        FACTOR: softmax_scale, times log2(e) if nothing is applied between the product and the exponential.
        CAP: Soft cap, or None.
        FAST_TANH: Whether the device's approximate tanh is used, since its precision suffices.
        LEFT: `p - LEFT <= k`; None is open.
        RIGHT: `k <= p + RIGHT`; None is open.
        CHUNK: Positions per chunk, or None.
        ROW_POSITIONS: Whether positions of query rows are loaded, since a tile has rows of several sequences.
        ALIBI: Whether there are ALiBi slopes.
        PARTIAL_STAGES: Pipeline stages of the loop over partial tiles.
        QQ: Entries of `qq_bias`; 0 without it.
        QQ_ROWS: Rows of a table of `qq_bias`; 0 if tables are packed, so that each has its own number.
        QQ_PER_SEQUENCE: Whether each sequence has such a table.
        QQ_PACKED: Whether tables are packed; `qq_tables` has the start and the rows of each sequence's.
        SINKS: Whether there are sinks.
        PLAIN: Whether scores are scaled products, with nothing else applied.
        VALUE_SCALE: Factor on the output.
        ROUND: Dtype that queries, keys and values are rounded to, or None.
        BYTES: Bytes per element of the cache.
        OPERAND: Dtype of the product of queries and keys.
        VALUE: Dtype of the product of weights and values.
        PRECISION: How Triton multiplies float32 tiles: "ieee" or "tf32x3".
        WIDEN: Whether operands are converted to float32 first: the interpreter multiplies the bits of bfloat16.
    """

    ROWS: int
    SEQUENCES: int
    H: int
    HK: int
    SPLITS: int
    G: int
    D: int
    DV: int
    BD: int
    BV: int
    LATENT: int
    ROTARY: int
    BR: int
    TAIL: bool
    PAGES: int
    PAGE_SIZE: int
    TABLE: int
    KEY_STRIDES: Strides
    VALUE_STRIDES: Strides
    KEY_ELEMENTS: int
    VALUE_ELEMENTS: int
    VALUE_OFFSET: int
    BLOCK_Q: int
    M: int
    BLOCK_KV: int
    WHOLE: bool
    FULL_TILES: bool
    ENTRIES: int
    CAPACITY: int
    PACKED: bool
    COUNTED: bool
    STARTED: bool
    PROGRAMS: int
    FACTOR: float
    CAP: float | None
    FAST_TANH: bool
    LEFT: int | None
    RIGHT: int | None
    CHUNK: int | None
    ROW_POSITIONS: bool
    ALIBI: bool
    PARTIAL_STAGES: int
    QQ: int
    QQ_ROWS: int
    QQ_PER_SEQUENCE: bool
    QQ_PACKED: bool
    SINKS: bool
    PLAIN: bool
    VALUE_SCALE: float
    ROUND: str | None
    BYTES: int
    OPERAND: str
    VALUE: str
    PRECISION: str
    WIDEN: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class WriteSpec:
    """Constants of the kernel that writes new tokens.

    Attributes:
        TOKENS: Query rows, each with a token.
        SEQUENCES: Sequences.
        TABLE: Entries per sequence of the block table.
        ENTRIES: Entries of the work list.
        BLOCK_Q: Query rows per entry.
        HK: KV heads of the tokens.
        HEADS: Heads of the cache, including padding heads.
        COMPONENTS: 2 if keys and values are in one array, one after the other.
        D: Columns of a token.
        LANES: Columns of a row of the cache.
        WIDTH: LANES, padded to a power of two.
        SPLIT: Number of a token's columns at the start of a row.
        SECOND: Column of a row of the cache at which the token's other columns start.
        PAGES: Pages of the cache.
        PAGE_SIZE: Slots per page.
        STRIDES: Strides of pages, slots and heads, in elements.
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


def make_spec(
    record: PagedAttention,
    config: PagedForward,
    entries: int,
    rotary: Rotary | None = None,
    row_positions: bool = False,
) -> PagedSpec:
    """Returns the constants of a record's kernels on the device in use.

    Args:
        record: The canonical arguments, without new tokens.
        config: Tile sizes and programs.
        entries: Entries of the work list.
        rotary: Rotary columns of a latent record.
        row_positions: Whether positions of query rows are loaded.
    """
    rows, heads, size = record.query.shape
    kv_heads, value_size = paged_cache.kv_heads(record), paged_cache.value_size(record)
    latent = 0 if record.latent is None else record.latent[0]
    tail = size - latent if rotary is not None and rotary.values else 0
    group = group_of(record, gpu_of(current_device()))
    left, right = band(record)
    stored = record.key_pages if record.value_pages is None else record.value_pages
    plain = record.alibi_slopes is None and record.qq_bias is None and record.logits_soft_cap is None
    operand = record.compute_dtype or promoted(record.query.dtype, record.key_pages.dtype)
    key_strides, value_strides, offset = _strides(record, rotary)
    page_size = paged_cache.page_size(record)
    nvidia = current_device().vendor == "nvidia"
    return PagedSpec(
        ROWS=rows,
        SEQUENCES=record.kv_lens.shape[0],
        H=heads,
        HK=kv_heads,
        SPLITS=heads // kv_heads // group,
        G=group,
        D=size,
        DV=value_size + tail,
        BD=padded_for_dot(latent or size),
        BV=padded_for_dot(value_size),
        LATENT=latent,
        ROTARY=size - latent if latent else 0,
        BR=padded_for_dot(size - latent) if latent else 16,
        TAIL=tail > 0,
        PAGES=paged_cache.page_count(record),
        PAGE_SIZE=page_size,
        TABLE=0 if record.block_tables is None else record.block_tables.shape[1],
        KEY_STRIDES=key_strides,
        VALUE_STRIDES=value_strides,
        KEY_ELEMENTS=record.key_pages.size,
        VALUE_ELEMENTS=stored.size if rotary is None else rotary.rows.size,
        VALUE_OFFSET=offset,
        BLOCK_Q=config.block_q,
        M=padded_for_dot(config.block_q * group),
        BLOCK_KV=config.block_kv,
        WHOLE=record.block_tables is None or (config.whole_pages and page_size % config.block_kv == 0),
        # Tiles of few rows are memory-bound even with masks, but not with loads of biases.
        FULL_TILES=record.qq_bias is not None
        or config.block_q * group >= (16 if interpreting() else PREFILL_SCORE_ROWS),
        ENTRIES=entries,
        CAPACITY=paged_cache.capacity(record),
        PACKED=record.query_start is not None,
        COUNTED=record.num_seqs is not None and record.query_start is not None,
        STARTED=record.kv_starts is not None,
        PROGRAMS=config.num_programs,
        FACTOR=record.softmax_scale * (LOG2E if plain else 1.0),
        CAP=record.logits_soft_cap,
        FAST_TANH=nvidia and record.query.dtype != jnp.float32 and not interpreting(),
        LEFT=left,
        RIGHT=right,
        ALIBI=record.alibi_slopes is not None,
        **_pair_tables(record.qq_bias),
        CHUNK=record.chunk_size,
        PARTIAL_STAGES=partial_stages(record, config.num_stages),
        ROW_POSITIONS=row_positions,
        SINKS=record.softmax_aux is not None,
        PLAIN=plain,
        VALUE_SCALE=record.value_scale,
        ROUND=None if record.compute_dtype is None else jnp.dtype(record.compute_dtype).name,
        BYTES=jnp.dtype(stored.dtype).itemsize,
        OPERAND=jnp.dtype(operand).name,
        VALUE=promoted(record.query.dtype, stored.dtype).name,
        PRECISION="tf32x3" if nvidia else "ieee",
        WIDEN=interpreting(),
    )


def _pair_tables(bias: jax.Array | None) -> dict[str, Any]:
    """Returns the constants of `qq_bias`."""
    rank = 0 if bias is None else bias.ndim
    return {
        "QQ": 0 if bias is None else bias.size,
        "QQ_ROWS": bias.shape[-1] if bias is not None and rank > 1 else 0,
        "QQ_PER_SEQUENCE": rank == 3,
        "QQ_PACKED": rank == 1,
    }


def promoted(query: Any, stored: Any) -> Any:
    """Returns the wider of two dtypes; 8-bit caches are converted to the query's dtype."""
    return jnp.dtype(query if jnp.dtype(stored).itemsize == 1 else jnp.promote_types(query, stored))


def _strides(record: PagedAttention, rotary: Rotary | None) -> tuple[Strides, Strides, int]:
    """Returns strides of keys and of values (or rotary columns) over pages, slots and heads, and the offset of the
    latter.
    """
    keys = strides_of(record.key_pages, record.kv_layout)
    if rotary is not None:
        return keys, strides_of(rotary.rows, record.kv_layout), rotary.start
    if record.value_pages is not None:
        return keys, strides_of(record.value_pages, record.kv_layout), 0
    return keys, keys, record.key_pages.shape[-1]


def strides_of(pages: jax.Array, layout: str) -> Strides:
    """Returns the strides of pages, slots and heads of a cache array, in elements."""
    sizes = dict(zip(layout, pages.shape, strict=True))
    strides: dict[str, int] = {}
    step = 1
    for axis in reversed(layout):
        strides[axis] = step
        step *= sizes[axis]
    return strides["p"], strides["s"], strides.get("h", 0)
