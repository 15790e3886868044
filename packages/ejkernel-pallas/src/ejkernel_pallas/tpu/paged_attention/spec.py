"""The compile-time constants of a paged-attention kernel: everything about a record except arrays and traced
numbers.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from ejkernel.arithmetic import cdiv
from ejkernel.families.paged_attention import PagedAttention, causal_window_bounds
from ejkernel.families.paged_attention import pages as paged_cache
from ejkernel.ops.device import current_device
from ejkernel.planning.precision import product_precision
from ejkernel_pallas.tpu.generations import has_256_wide_mxu, is_v7x
from ejkernel_pallas.tpu.mosaic.paged_functions import BY_KEY, PagedFunctions, paged_functions
from ejkernel_pallas.tpu.mosaic.paged_layout import (
    CacheLayout,
    make_cache_layout,
    product_head_dims,
    whole_page_block_keys,
)
from ejkernel_pallas.tpu.mosaic.vectors import LANES

SMALL_PRODUCT_ROWS, LARGE_PRODUCT_ROWS = 128, 1024
"""The largest numbers of query rows per product: where pairs are masked or tokens few, and elsewhere."""
KEYS_PER_PART, KEYS_PER_CHUNK, DEFAULT_BLOCK_KEYS = 256, 512, 1024
"""Keys per product of many rows, per product of few rows, and of all products of a decode step together."""
LATENT_KEYS_PER_PART, LATENT_CHUNKS_PER_STEP = 512, 4
"""Keys per product of latent rows, and products per decode step. The accumulator of 512 columns is rescaled once per
product, so products of many rows take more keys than elsewhere; docs/lab/tpu_kernels.md has the estimates.
"""
CODE_KEYS_PER_CHUNK, CODE_CHUNKS_PER_STEP, MAX_CODE_TILE_ROWS = 256, 4, 128
"""Keys per product with unpacked codes, products per step, and the most query rows of a tile: codes are unpacked once
per tile, so that a tile's rows are all in one product.
"""
PREFETCHED_BLOCKS = 2
"""The number of blocks whose copies are in flight while another block is computed."""
MAX_UNROLLED_COPIES = 128
"""The largest number of page copies that are started without a loop; the code grows with it."""


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
        tokens_per_tile: Query tokens per tile: a multiple of `sequence_token_multiple`, or 1.
        sequence_token_multiple: Tokens between two rows of the packed queries where a copy may begin; every sequence
            has a multiple of it, or every token if a tile has one token.
        rows_per_tile: Query rows per KV head and tile; a multiple of `query_rows_per_copy`.
        query_rows_per_copy: Query rows per copy.
        smallest_product_rows: Query rows per KV head in the smallest product.
        masked_product_rows: Query rows per product of a large tile where pairs are masked or tokens few; divides
            `rows`.
        unmasked_product_rows: Query rows per product of a large tile elsewhere; divides `rows`.
        part_kv: Keys per product of a large tile; divides `chunk_kv`.
        block_kv: Keys that are copied together.
        chunk_kv: Keys per product of few rows; divides `block_kv`.
        chunks_per_step: Chunks whose products are computed together.
        lookahead: Products of few rows whose scores are computed before the softmax of the first of them.
        masked_lookahead: The same where some keys are masked.
        stores_score_limits: Whether the mask of each row's own head is kept in scratch memory, where heads share
            products. There are few mask registers, and a mask that is live during a whole block would be spilled.
        copies_per_slice: Copies of the prefetched block that are started together while a block is computed.
        pages_per_sequence: Entries per sequence in the page table.
        cache_layout: Layout of keys and values in memory.
        operand_dtype: Dtype of queries and keys in products.
        weights_dtype: Dtype of weights and values in products.
        rounds_to_bfloat16: Whether keys and values are rounded to bfloat16 first.
        precision: Precision of the matrix products.
        score_scale: Factor on the scores.
        soft_cap: Soft cap, or None.
        window_left: The query at position p attends no key before p - window_left; None is open.
        window_right: The query at position p attends no key after p + window_right; None is open.
        attention_chunk: Positions per chunk of chunked attention, whose queries and keys attend within their chunk
            alone; None without chunks.
        has_slopes: Whether scores have ALiBi's term.
        pair_bias_columns: Columns of the bias for pairs of new tokens; 0 without it.
        has_row_positions: Whether the mask reads a position of each row: rows of a tile are of several sequences.
        has_row_contexts: Whether ALiBi's term reads a context length of each row, for the same reason.
        output_dtype: Dtype of the output.
        value_scale: Factor on the output.
        num_cores: Cores of the chip that work on the list, each on items of its own.
        has_equal_products: Whether all products have `smallest_product_rows` rows and `part_kv` keys.
        functions: `score_mod` and `mask_mod`; None without them.
    """

    group_size: int
    heads_per_product: int
    kv_heads: int
    head_dim: int
    value_dim: int
    tokens_per_tile: int
    sequence_token_multiple: int
    rows_per_tile: int
    query_rows_per_copy: int
    smallest_product_rows: int
    masked_product_rows: int
    unmasked_product_rows: int
    part_kv: int
    block_kv: int
    chunk_kv: int
    chunks_per_step: int
    lookahead: int
    masked_lookahead: int
    stores_score_limits: bool
    copies_per_slice: int
    pages_per_sequence: int
    cache_layout: CacheLayout
    operand_dtype: Any
    weights_dtype: Any
    rounds_to_bfloat16: bool
    precision: lax.Precision | None
    score_scale: float
    soft_cap: float | None
    window_left: int | None
    window_right: int | None
    attention_chunk: int | None
    has_slopes: bool
    pair_bias_columns: int
    has_row_positions: bool
    has_row_contexts: bool
    output_dtype: Any
    value_scale: float
    num_cores: int
    has_equal_products: bool
    functions: PagedFunctions | None = None

    @property
    def heads(self) -> int:
        """Returns the number of query heads, including those of KV heads that only pad a word."""
        return self.kv_heads * self.group_size

    @property
    def packed_token_stride(self) -> int:
        """Returns the distance of a sequence's tokens in the packed queries: every tile begins where a copy may."""
        return self.sequence_token_multiple if self.tokens_per_tile == 1 else 1

    @property
    def has_last_token_per_key(self) -> bool:
        """Returns whether a key has a last token that attends it."""
        return self.window_left is not None or self.attention_chunk is not None

    @property
    def reads_context_lengths(self) -> bool:
        """Returns whether the kernel reads how many tokens each sequence has before its queries."""
        return self.pair_bias_columns > 0 or (self.has_slopes and not self.has_row_contexts)

    @property
    def pages_per_block(self) -> int:
        """Returns the number of pages that are copied together."""
        return self.block_kv // self.cache_layout.slots_per_page

    @property
    def num_copy_slices(self) -> int:
        """Returns in how many slices the prefetched block's copies are started while a block is computed; 0 if
        before it.

        Slices are used if a block is one step of products and all items have one token.
        """
        if self.cache_layout.is_latent or self.cache_layout.codes is not None:  # their loads have no slices
            return 0
        copies = self.pages_per_block * self.cache_layout.num_lane_groups
        copies *= 1 if self.cache_layout.has_combined_keys_and_values else 2
        once = self.chunk_kv * self.chunks_per_step == self.block_kv and self.cache_layout.num_head_groups == 1
        is_sliced = self.tokens_per_tile == 1 and once and copies <= MAX_UNROLLED_COPIES
        return cdiv(copies, self.copies_per_slice) if is_sliced else 0

    @property
    def computes_blocks_in_one_step(self) -> bool:
        """Returns whether a block that needs no mask is computed in one step; others are computed in two halves."""
        once = self.tokens_per_tile == 1 and self.chunk_kv * self.chunks_per_step == self.block_kv
        is_unsliced = self.cache_layout.is_latent or self.cache_layout.codes is not None
        return self.num_copy_slices > 0 or (is_unsliced and once)


@dataclasses.dataclass(frozen=True)
class PagedTiles:
    """The tiles of a configuration: query tokens, keys, parts of the work list, and rows and keys of all products in a
    `batch_invariant` block, 0 elsewhere. The rows are 0 also where all calls of an operation decode.
    """

    queries: int
    keys: int
    parts: int
    product_rows: int = 0
    product_keys: int = 0


class RowTerms(NamedTuple):
    """What rows of a tile have for themselves, since they belong to several sequences.

    Attributes:
        positions: Whether the mask reads a position of each row.
        contexts: Whether ALiBi's term reads a context length of each row.
    """

    positions: bool = False
    contexts: bool = False


NO_ROW_TERMS = RowTerms()


def pair_bias_columns(record: PagedAttention) -> int:
    """Returns an upper bound on the columns of the bias for pairs of new tokens; 0 without it."""
    bias, tokens = record.qq_bias, record.query.shape[0]
    if bias is None:
        return 0
    columns = math.isqrt(bias.shape[0]) if bias.ndim == 1 else bias.shape[-1]
    return max(1, min(columns, tokens))


def heads_share_products(record: PagedAttention) -> bool:
    """Returns whether keys of several heads share one product if every sequence has one query.

    A bias for pairs has one column per key, so its keys are in the order of positions, head by head; as are the values
    of functions that are read by key.
    """
    functions = paged_functions(record)
    if record.qq_bias is not None or (functions is not None and functions.has_rows(BY_KEY)):
        return False
    return make_cache_layout(record).kv_heads_can_share_products and _operand_dtype(record).itemsize == 2


def make_spec(
    record: PagedAttention, sizes: PagedTiles, *, row_terms: RowTerms = NO_ROW_TERMS, output_dtype: Any = None
) -> PagedSpec:
    """Returns the constants of a record's kernel with given tiles.

    Args:
        record: The record.
        sizes: The tiles.
        row_terms: The terms that each row has for itself.
        output_dtype: Dtype of the output; None for the query's.
    """
    cache = make_cache_layout(record)
    left, right = causal_window_bounds(record)
    operand = _operand_dtype(record)
    heads = cdiv(paged_cache.kv_heads(record), cache.kv_heads_per_word_row) * cache.kv_heads_per_word_row
    heads_per_product = (
        cache.kv_heads_per_group if _has_single_token_tiles(record, sizes) and heads_share_products(record) else 1
    )
    head_dim, value_dim = product_head_dims(record, cache)
    return PagedSpec(
        heads_per_product=heads_per_product,
        kv_heads=heads // heads_per_product,
        head_dim=head_dim,
        value_dim=value_dim,
        **_query_row_fields(record, sizes, heads_per_product),
        **_key_block_fields(record, sizes, cache, heads_per_product),
        **_pipeline_fields(record, heads_per_product),
        pages_per_sequence=1 if record.block_tables is None else record.block_tables.shape[1],
        cache_layout=cache,
        operand_dtype=operand,
        weights_dtype=_weights_dtype(record),
        rounds_to_bfloat16=record.compute_dtype is not None and operand.itemsize < record.key_pages.dtype.itemsize,
        precision=_precision(record),
        score_scale=record.softmax_scale,
        soft_cap=record.logits_soft_cap,
        window_left=left,
        window_right=right,
        attention_chunk=record.chunk_size,
        has_slopes=record.alibi_slopes is not None,
        pair_bias_columns=pair_bias_columns(record),
        has_row_positions=row_terms.positions,
        has_row_contexts=row_terms.contexts,
        output_dtype=jnp.dtype(record.query.dtype if output_dtype is None else output_dtype),
        value_scale=record.value_scale,
        num_cores=sizes.parts,
        has_equal_products=sizes.product_rows > 0,
        functions=paged_functions(record),
    )


def _has_single_token_tiles(record: PagedAttention, sizes: PagedTiles) -> bool:
    """Returns whether a tile has one query token."""
    return not sizes.product_rows and (record.query_start is None or sizes.queries == 1)


def _query_row_fields(record: PagedAttention, sizes: PagedTiles, heads_per_product: int) -> dict[str, int]:
    """Returns the fields of `PagedSpec` about query rows."""
    group, queries = record.query.shape[1] // paged_cache.kv_heads(record) * heads_per_product, sizes.queries
    if record.code_bits is not None:
        queries = min(queries, max(1, MAX_CODE_TILE_ROWS // group))
    query_rows_per_copy = 32 // _operand_dtype(record).itemsize
    sequence_token_multiple, smallest_product_rows = (
        query_rows_per_copy // math.gcd(query_rows_per_copy, group),
        cdiv(group, query_rows_per_copy) * query_rows_per_copy,
    )
    tokens = (
        1
        if _has_single_token_tiles(record, sizes)
        else max(1, queries // sequence_token_multiple) * sequence_token_multiple
    )
    rows = smallest_product_rows if _has_single_token_tiles(record, sizes) else tokens * group
    if record.code_bits is not None:
        smallest_product_rows = rows
    if sizes.product_rows:  # a tile of one token would have products of another kernel
        smallest_product_rows, unit = sizes.product_rows, math.lcm(sizes.product_rows, 2 * group)
        rows = max(1, queries * group // unit) * unit
        tokens = rows // group

    def largest_divisor(limit: int) -> int:
        return max(
            n
            for n in range(query_rows_per_copy, max(limit, smallest_product_rows) + 1, query_rows_per_copy)
            if rows % n == 0
        )

    return {
        "group_size": group,
        "tokens_per_tile": tokens,
        "sequence_token_multiple": sequence_token_multiple,
        "rows_per_tile": rows,
        "query_rows_per_copy": query_rows_per_copy,
        "smallest_product_rows": smallest_product_rows,
        "masked_product_rows": sizes.product_rows or largest_divisor(SMALL_PRODUCT_ROWS),
        "unmasked_product_rows": sizes.product_rows or largest_divisor(LARGE_PRODUCT_ROWS),
    }


def _key_block_fields(
    record: PagedAttention, sizes: PagedTiles, cache: CacheLayout, heads_per_product: int
) -> dict[str, int]:
    """Returns the fields of `PagedSpec` about keys per copy and per product."""
    single = _has_single_token_tiles(record, sizes)
    # Mosaic does not load a single lane group of the norms at a traced index.
    multiple = sizes.product_keys or (LANES if cache.codes is None else CODE_KEYS_PER_CHUNK)
    # Where all calls decode, a block may be larger than the cache, so that it has the same steps for all caches.
    keys = sizes.keys if sizes.product_keys and single else min(sizes.keys, paged_cache.max_sequence_len(record))
    block = whole_page_block_keys(math.lcm(cache.slots_per_page, multiple), keys)
    if sizes.product_keys and not single:
        return {"part_kv": multiple, "block_kv": block, "chunk_kv": multiple, "chunks_per_step": 1}
    chunk, per_step = _product_sizes(
        block, single, heads_per_product, 16 if has_256_wide_mxu(current_device().kind) else 8
    )
    if cache.is_latent and single:
        chunk = sizes.product_keys or math.gcd(block, LATENT_KEYS_PER_PART)
        per_step = math.gcd(block // chunk, LATENT_CHUNKS_PER_STEP)
    if cache.codes is not None:
        chunk = math.gcd(block, CODE_KEYS_PER_CHUNK)
        per_step = math.gcd(block // chunk, CODE_CHUNKS_PER_STEP)
    part = math.gcd(chunk, LATENT_KEYS_PER_PART if cache.is_latent else KEYS_PER_PART)
    return {"part_kv": part, "block_kv": block, "chunk_kv": chunk, "chunks_per_step": per_step}


def _pipeline_fields(record: PagedAttention, heads_per_product: int) -> dict[str, Any]:
    """Returns the fields of `PagedSpec` about what is computed and copied early.

    Computing scores early hides the MXU's latency, but takes registers. Where copies take longer than products, or keys
    are few, a smaller lookahead costs nothing.
    """
    kind = current_device().kind
    shared, v7x, lookahead = heads_per_product > 1, is_v7x(kind), 5 if has_256_wide_mxu(kind) else 2
    return {
        "lookahead": 2 if shared and not v7x else lookahead,
        "masked_lookahead": min(lookahead, 4) if shared else lookahead,
        "stores_score_limits": shared and v7x and record.score_mod is None,  # the minimum with NaN is NaN
        "copies_per_slice": 3 if v7x else 4,
    }


def _product_sizes(
    block: int, is_single_token: bool, heads_per_product: int, max_products_per_step: int
) -> tuple[int, int]:
    """Returns keys per product, and products per step: at most `max_products_per_step`, the number that
    registers hold.
    """
    if heads_per_product == 1:
        return math.gcd(block, DEFAULT_BLOCK_KEYS if is_single_token else KEYS_PER_CHUNK), 1
    chunk = math.gcd(block, DEFAULT_BLOCK_KEYS // max_products_per_step)
    return chunk, math.gcd(block // chunk, max_products_per_step)


def _weights_dtype(record: PagedAttention) -> Any:
    """Returns the wider dtype of queries and cache; 8-bit caches are converted to the query's dtype."""
    query, cache = record.query.dtype, record.key_pages.dtype
    return jnp.dtype(query if cache.itemsize == 1 else jnp.promote_types(query, cache))


def _operand_dtype(record: PagedAttention) -> Any:
    return _weights_dtype(record) if record.compute_dtype is None else jnp.dtype(record.compute_dtype)


def _precision(record: PagedAttention) -> lax.Precision | None:
    """Returns the nearest precision that Mosaic has: products in one bfloat16 pass or in six."""
    requested_precision = product_precision(_weights_dtype(record))
    return lax.Precision.HIGHEST if requested_precision == lax.Precision.HIGH else requested_precision
