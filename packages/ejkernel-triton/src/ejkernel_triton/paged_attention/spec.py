"""The compile-time constants of the paged-attention kernels."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.arithmetic import LOG2E
from ejkernel.families.paged_attention import PagedAttention, causal_window_bounds
from ejkernel.families.paged_attention import pages as paged_cache
from ejkernel.families.paged_attention.latent_pages import RotaryColumns
from ejkernel.ops.chips import gpu_of
from ejkernel.ops.device import current_device
from ejkernel_triton.launch import is_interpreting
from ejkernel_triton.paged_attention.config import (
    PREFILL_SCORE_ROWS,
    PagedForward,
    partial_tile_stages,
    query_heads_per_tile,
)
from ejkernel_triton.paged_attention.fixed_splits import config as fixed_splits
from ejkernel_triton.sizes import pad_to_dot_size

Strides = tuple[int, int, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedSpec:
    """Constants of the kernels; the letters are those of the record.

    Attributes:
        NUM_QUERY_ROWS: T, query rows of the call.
        NUM_SEQUENCES: N.
        H: Query heads.
        HK: KV heads.
        HEAD_TILES_PER_KV_HEAD: Tiles that the query heads of a KV head are split into; a program has one of them.
        G: Query heads per such tile.
        D: Head dimension of queries and keys.
        DV: Head dimension of values.
        BD: Columns of a tile of keys: D or, in a latent cache, R, padded to a power of two of at least 16.
        LATENT_DIM: R of a latent cache, whose tiles of keys are also its tiles of values; 0 for others.
        ROTARY_DIM: Key columns in addition to those of the latent vector; they are in the array of values.
        BLOCK_ROTARY: ROTARY_DIM, padded to a power of two of at least 16.
        ROTARY_IS_VALUE: Whether these columns are values too, after those of the latent vector.
        BV: DV, padded to a power of two of at least 16.
        NUM_PAGES: Pages of the cache.
        PAGE_SIZE: Slots per page.
        PAGES_PER_SEQUENCE: Entries per sequence of the block table; 0 if sequence n has page n.
        KEY_STRIDES: Strides of the keys' pages, slots and heads, in elements.
        VALUE_STRIDES: The same for the values.
        KEY_CACHE_BATCH_STRIDE: Elements between the key caches of two batch rows.
        VALUE_CACHE_BATCH_STRIDE: The same for the value caches.
        VALUE_OFFSET: Offset of the values in a combined cache, or of rotary columns in a latent one; else 0.
        BLOCK_Q: Query rows per tile.
        M: Rows of a tile of scores: BLOCK_Q query rows times G heads, padded to a power of two.
        BLOCK_KV: Keys per tile.
        TILE_IS_WITHIN_PAGE: Whether a tile is within one page, whose index it loads once.
        HAS_UNMASKED_LOOP: Whether full tiles have a separate loop without masks.
        NUM_ENTRIES: Entries of the work list.
        MAX_KV_LEN: Tokens of the longest sequence that the tables can describe.
        HAS_QUERY_START: Whether sequences have any number of query rows, instead of one each.
        HAS_NUM_SEQS: Whether `num_seqs` has the number of live sequences.
        HAS_KV_STARTS: Whether `kv_starts` has the sequences' first keys.
        NUM_PROGRAMS: Persistent programs that share the key tiles.
        SCORE_SCALE: softmax_scale, times log2(e) if nothing is applied between the product and the exponential.
        SOFT_CAP: Soft cap, or None.
        USES_FAST_TANH: Whether the device's approximate tanh is used, since its precision suffices.
        WINDOW_LEFT: `p - WINDOW_LEFT <= k`; None is open.
        WINDOW_RIGHT: `k <= p + WINDOW_RIGHT`; None is open.
        CHUNK_SIZE: Positions per chunk, or None.
        LOAD_ROW_POSITIONS: Whether positions of query rows are loaded, since a tile has rows of several sequences.
        HAS_ALIBI: Whether there are ALiBi slopes.
        PARTIAL_TILE_STAGES: Pipeline stages of the loop over partial tiles.
        NUM_QQ_BIAS_ELEMENTS: Entries of `qq_bias`; 0 without it.
        NUM_QQ_BIAS_ROWS: Rows of a table of `qq_bias`; 0 if tables are packed, so that each has its own number.
        HAS_QQ_BIAS_PER_SEQUENCE: Whether each sequence has such a table.
        QQ_BIAS_IS_PACKED: Whether tables are packed; `qq_bias_table_ranges` has start and rows of each sequence's.
        HAS_SINKS: Whether there are sinks.
        SCORES_ARE_ONLY_SCALED: Whether scores are scaled products, with nothing else applied.
        VALUE_SCALE: Factor on the output.
        COMPUTE_DTYPE: Dtype that queries, keys and values are rounded to, or None.
        CACHE_ITEMSIZE: Bytes per element of the cache.
        QK_DTYPE: Dtype of the product of queries and keys.
        PV_DTYPE: Dtype of the product of weights and values.
        PRECISION: How Triton multiplies float32 tiles: "ieee" or "tf32x3".
        WIDEN_TO_FLOAT32: Whether operands are converted first: the interpreter multiplies the bits of bfloat16.
        SPLIT_TILES: Key tiles per split of `fixed_split_kernel`; 0 for other kernels.
        CUTS_ITEMS: Whether several programs may have splits of an item.
        SLOTS_PER_PROGRAM: Partial softmaxes that a program has room for.
        SLOT_ROWS: Rows of each.
    """

    NUM_QUERY_ROWS: int
    NUM_SEQUENCES: int
    H: int
    HK: int
    HEAD_TILES_PER_KV_HEAD: int
    G: int
    D: int
    DV: int
    BD: int
    BV: int
    LATENT_DIM: int
    ROTARY_DIM: int
    BLOCK_ROTARY: int
    ROTARY_IS_VALUE: bool
    NUM_PAGES: int
    PAGE_SIZE: int
    PAGES_PER_SEQUENCE: int
    KEY_STRIDES: Strides
    VALUE_STRIDES: Strides
    KEY_CACHE_BATCH_STRIDE: int
    VALUE_CACHE_BATCH_STRIDE: int
    VALUE_OFFSET: int
    BLOCK_Q: int
    M: int
    BLOCK_KV: int
    TILE_IS_WITHIN_PAGE: bool
    HAS_UNMASKED_LOOP: bool
    NUM_ENTRIES: int
    MAX_KV_LEN: int
    HAS_QUERY_START: bool
    HAS_NUM_SEQS: bool
    HAS_KV_STARTS: bool
    NUM_PROGRAMS: int
    SCORE_SCALE: float
    SOFT_CAP: float | None
    USES_FAST_TANH: bool
    WINDOW_LEFT: int | None
    WINDOW_RIGHT: int | None
    CHUNK_SIZE: int | None
    LOAD_ROW_POSITIONS: bool
    HAS_ALIBI: bool
    PARTIAL_TILE_STAGES: int
    NUM_QQ_BIAS_ELEMENTS: int
    NUM_QQ_BIAS_ROWS: int
    HAS_QQ_BIAS_PER_SEQUENCE: bool
    QQ_BIAS_IS_PACKED: bool
    HAS_SINKS: bool
    SCORES_ARE_ONLY_SCALED: bool
    VALUE_SCALE: float
    COMPUTE_DTYPE: str | None
    CACHE_ITEMSIZE: int
    QK_DTYPE: str
    PV_DTYPE: str
    PRECISION: str
    WIDEN_TO_FLOAT32: bool
    SPLIT_TILES: int
    CUTS_ITEMS: bool
    SLOTS_PER_PROGRAM: int
    SLOT_ROWS: int


def make_spec(
    record: PagedAttention,
    config: PagedForward,
    num_entries: int,
    rotary: RotaryColumns | None = None,
    loads_row_positions: bool = False,
) -> PagedSpec:
    """Returns the constants of a record's kernels on the device in use.

    Args:
        record: The canonical arguments, without new tokens.
        config: Tile sizes and programs.
        num_entries: Entries of the work list.
        rotary: The rotary columns of a latent record.
        loads_row_positions: Whether positions of query rows are loaded.
    """
    rows, heads, head_dim = record.query.shape
    kv_heads, page_size = paged_cache.kv_heads(record), paged_cache.page_size(record)
    heads_per_tile = query_heads_per_tile(record, gpu_of(current_device()))
    tile_is_within_page = config.tile_within_page and page_size % config.block_kv == 0
    return PagedSpec(
        NUM_QUERY_ROWS=rows,
        H=heads,
        HK=kv_heads,
        HEAD_TILES_PER_KV_HEAD=heads // kv_heads // heads_per_tile,
        G=heads_per_tile,
        D=head_dim,
        BLOCK_Q=config.block_q,
        M=pad_to_dot_size(config.block_q * heads_per_tile),
        BLOCK_KV=config.block_kv,
        TILE_IS_WITHIN_PAGE=record.block_tables is None or tile_is_within_page,
        HAS_UNMASKED_LOOP=_has_unmasked_loop(record, config, config.block_q * heads_per_tile),
        NUM_ENTRIES=num_entries,
        NUM_PROGRAMS=config.num_programs,
        PARTIAL_TILE_STAGES=partial_tile_stages(record, config.num_stages),
        LOAD_ROW_POSITIONS=loads_row_positions,
        VALUE_SCALE=record.value_scale,
        WIDEN_TO_FLOAT32=is_interpreting(),
        **fixed_splits.split_constants(record, config, heads_per_tile, num_entries),
        **_sequence_constants(record),
        **_column_constants(record, rotary),
        **_cache_constants(record, rotary),
        **_score_constants(record),
        **_dtype_constants(record),
    )


def _has_unmasked_loop(record: PagedAttention, config: PagedForward, score_rows: int) -> bool:
    # The loop comes first. If a range begins with partial tiles, that is not the order of its tiles.
    if config.batch_invariant and not fixed_splits.begins_with_full_tiles(record):
        return False
    # Tiles of few rows are memory-bound even with masks, but not with loads of biases.
    return record.qq_bias is not None or score_rows >= (16 if is_interpreting() else PREFILL_SCORE_ROWS)


def _sequence_constants(record: PagedAttention) -> dict[str, Any]:
    """Returns the constants of the sequences: how many, how long, and which arrays describe them."""
    return {
        "NUM_SEQUENCES": record.kv_lens.shape[0],
        "MAX_KV_LEN": paged_cache.max_sequence_len(record),
        "HAS_QUERY_START": record.query_start is not None,
        "HAS_NUM_SEQS": record.num_seqs is not None and record.query_start is not None,
        "HAS_KV_STARTS": record.kv_starts is not None,
    }


def _column_constants(record: PagedAttention, rotary: RotaryColumns | None) -> dict[str, Any]:
    """Returns the constants of the columns of keys, values and the rotary part."""
    head_dim, value_dim = record.query.shape[-1], paged_cache.value_head_dim(record)
    latent_dim = 0 if record.latent is None else record.latent[0]
    rotary_value_dim = head_dim - latent_dim if rotary is not None and rotary.are_values else 0
    return {
        "DV": value_dim + rotary_value_dim,
        "BD": pad_to_dot_size(latent_dim or head_dim),
        "BV": pad_to_dot_size(value_dim),
        "LATENT_DIM": latent_dim,
        "ROTARY_DIM": head_dim - latent_dim if latent_dim else 0,
        "BLOCK_ROTARY": pad_to_dot_size(head_dim - latent_dim) if latent_dim else 16,
        "ROTARY_IS_VALUE": rotary_value_dim > 0,
    }


def _cache_constants(record: PagedAttention, rotary: RotaryColumns | None) -> dict[str, Any]:
    """Returns the constants of the cache's pages and strides."""
    key_strides, value_strides, value_offset = _key_and_value_strides(record, rotary)
    value_array = _value_array(record)
    return {
        "NUM_PAGES": paged_cache.page_count(record),
        "PAGE_SIZE": paged_cache.page_size(record),
        "PAGES_PER_SEQUENCE": 0 if record.block_tables is None else record.block_tables.shape[1],
        "KEY_STRIDES": key_strides,
        "VALUE_STRIDES": value_strides,
        "KEY_CACHE_BATCH_STRIDE": record.key_pages.size,
        "VALUE_CACHE_BATCH_STRIDE": value_array.size if rotary is None else rotary.rows.size,
        "VALUE_OFFSET": value_offset,
        "CACHE_ITEMSIZE": jnp.dtype(value_array.dtype).itemsize,
    }


def _score_constants(record: PagedAttention) -> dict[str, Any]:
    """Returns the constants of what is applied to scores: scale, soft cap, masks, biases and sinks."""
    only_scaled_scores = record.alibi_slopes is None and record.qq_bias is None and record.logits_soft_cap is None
    is_nvidia = current_device().vendor == "nvidia"
    left, right = causal_window_bounds(record)
    return {
        "SCORE_SCALE": record.softmax_scale * (LOG2E if only_scaled_scores else 1.0),
        "SOFT_CAP": record.logits_soft_cap,
        "USES_FAST_TANH": is_nvidia and record.query.dtype != jnp.float32 and not is_interpreting(),
        "WINDOW_LEFT": left,
        "WINDOW_RIGHT": right,
        "CHUNK_SIZE": record.chunk_size,
        "HAS_ALIBI": record.alibi_slopes is not None,
        "HAS_SINKS": record.softmax_aux is not None,
        "SCORES_ARE_ONLY_SCALED": only_scaled_scores,
        **_qq_bias_constants(record.qq_bias),
    }


def _dtype_constants(record: PagedAttention) -> dict[str, Any]:
    """Returns the dtypes in which the kernel rounds and multiplies."""
    compute_dtype = record.compute_dtype
    qk_dtype = compute_dtype or wider_dtype(record.query.dtype, record.key_pages.dtype)
    return {
        "COMPUTE_DTYPE": None if compute_dtype is None else jnp.dtype(compute_dtype).name,
        "QK_DTYPE": jnp.dtype(qk_dtype).name,
        "PV_DTYPE": wider_dtype(record.query.dtype, _value_array(record).dtype).name,
        "PRECISION": "tf32x3" if current_device().vendor == "nvidia" else "ieee",
    }


def _value_array(record: PagedAttention) -> jax.Array:
    """Returns the array that holds the values: a combined cache's or a latent one's is that of the keys."""
    return record.key_pages if record.value_pages is None else record.value_pages


def _qq_bias_constants(bias: jax.Array | None) -> dict[str, Any]:
    """Returns the constants of `qq_bias`."""
    rank = 0 if bias is None else bias.ndim
    return {
        "NUM_QQ_BIAS_ELEMENTS": 0 if bias is None else bias.size,
        "NUM_QQ_BIAS_ROWS": bias.shape[-1] if bias is not None and rank > 1 else 0,
        "HAS_QQ_BIAS_PER_SEQUENCE": rank == 3,
        "QQ_BIAS_IS_PACKED": rank == 1,
    }


def wider_dtype(query_dtype: Any, cache_dtype: Any) -> Any:
    """Returns the wider of two dtypes; 8-bit caches are converted to the query's dtype."""
    return jnp.dtype(
        query_dtype if jnp.dtype(cache_dtype).itemsize == 1 else jnp.promote_types(query_dtype, cache_dtype)
    )


def _key_and_value_strides(record: PagedAttention, rotary: RotaryColumns | None) -> tuple[Strides, Strides, int]:
    """Returns strides of keys and of values (or rotary columns) over pages, slots and heads, and the offset of the
    latter.
    """
    keys = page_slot_head_strides(record.key_pages, record.kv_layout)
    if rotary is not None:
        return keys, page_slot_head_strides(rotary.rows, record.kv_layout), rotary.start
    if record.value_pages is not None:
        return keys, page_slot_head_strides(record.value_pages, record.kv_layout), 0
    return keys, keys, record.key_pages.shape[-1]


def page_slot_head_strides(pages: jax.Array, layout: str) -> Strides:
    """Returns the strides of pages, slots and heads of a cache array, in elements."""
    sizes = dict(zip(layout, pages.shape, strict=True))
    strides: dict[str, int] = {}
    stride = 1
    for letter in reversed(layout):
        strides[letter] = stride
        stride *= sizes[letter]
    return strides["p"], strides["s"], strides.get("h", 0)
