"""The compile-time constants of the latent kernel, and its refusals."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np

from ejkernel.arithmetic import LOG2E, cdiv
from ejkernel.families.paged_attention import PagedAttention, causal_window_bounds
from ejkernel.families.paged_attention import pages as paged_cache
from ejkernel.families.tiled_attention import TiledAttention
from ejkernel_pallas.gpu.hopper.sizes import WGMMA_M
from ejkernel_pallas.gpu.latent_attention.config import HopperLatent

LATENT_DIM = 512
"""Columns of a latent vector."""
HALF_COLUMNS = LATENT_DIM // 2
"""Columns of the output that one consumer warpgroup accumulates."""
ROTARY_DIM = 64
"""Rotary key columns."""
CHUNK_COLUMNS = 64
"""Contiguous columns in shared memory: one row of the 128-byte swizzle."""
CHUNKS_PER_HALF = HALF_COLUMNS // CHUNK_COLUMNS
"""Chunks per half."""
PIECES_PER_HALF = 2
"""Pieces per half, of whole chunks, with separate mbarriers: the product with one runs while the next is copied."""
BLOCK_KV = 64
"""Keys per block: one consumer warpgroup multiplies the queries with them."""
KEYS_PER_STEP = 2 * BLOCK_KV
"""Keys per step: a block for each of the two consumer warpgroups."""
SWIZZLE_ATOM_ROWS = 8
"""Rows per swizzle atom of shared memory: the smallest copy."""
CONSUMER_WARPGROUPS = 2
"""Consumer warpgroups."""
RESCALE_THRESHOLD = 8.0
"""How far, in base 2, a row's maximum may be below its largest score: weights are at most 256."""
MASKED_SCORE = -1e30
"""The maximum of no scores, and approximately a masked score: finite, so that differences are not NaN."""
MIN_SCORE_FACTOR = 1e-6
"""The smallest factor on scores for which a masked product is finite in float32, with a margin."""
REGISTERS_PER_THREAD = (240, 24)
"""Registers per thread of the consumer warpgroups, and of the producer's."""


class ScheduledSpec(Protocol):
    """The constants that copying, looping over and merging the items of a schedule read, named as in `LatentSpec`."""

    @property
    def num_items(self) -> int:
        """Number of items."""
        ...

    @property
    def stored_rows_per_item(self) -> int:
        """Rows of an item's tiles that are stored."""
        ...

    @property
    def tiles_per_item(self) -> int:
        """Tiles of 64 rows per item."""
        ...

    @property
    def dtype(self) -> Any:
        """The output's dtype."""
        ...

    @property
    def page_size(self) -> int:
        """Slots per page."""
        ...

    @property
    def num_pages(self) -> int:
        """Number of pages of the cache."""
        ...

    @property
    def pages_per_table_row(self) -> int:
        """Entries per block table; 0 if sequence n has page n."""
        ...

    @property
    def slots_per_copy(self) -> int:
        """Slots per copy."""
        ...


@dataclasses.dataclass(frozen=True)
class LatentSpec:
    """Constants of the kernel.

    Attributes:
        num_items: Query rows of the call.
        stored_rows_per_item: Query heads.
        tiles_per_item: Tiles of 64 heads.
        num_programs: Programs over which the key blocks are distributed, for each tile of heads.
        page_size: Slots per page.
        num_pages: Pages of the cache.
        pages_per_table_row: Entries per block table; 0 if sequence n has page n.
        rotary_start: First of the rotary columns in their array.
        slots_per_copy: Rows per copy.
        has_key_starts: Whether sequences have first keys other than 0, by `kv_starts` or a window.
        softmax_scale_log2: Factor that converts products to base 2.
        rescales_lazily: Whether a row's maximum moves only if scores exceed it by `RESCALE_THRESHOLD`.
        dtype: Dtype of queries, cache and output.
        value_scale: Factor on the output.
        stored_rows_per_tile: Rows of a tile that are stored and merged: 64, or the heads of a single tile.
        max_share_growth_percent: Percent by which a share may grow so that no item is split.
    """

    num_items: int
    stored_rows_per_item: int
    tiles_per_item: int
    num_programs: int
    page_size: int
    num_pages: int
    pages_per_table_row: int
    rotary_start: int
    slots_per_copy: int
    has_key_starts: bool
    softmax_scale_log2: float
    rescales_lazily: bool
    dtype: Any
    value_scale: float
    stored_rows_per_tile: int
    max_share_growth_percent: int

    @property
    def masked_product(self) -> float:
        """Returns the value of a masked product: a power of two, so that scaling it is exact."""
        return -(2.0 ** math.ceil(math.log2(-MASKED_SCORE / self.exp2_factor)))

    @property
    def masked_score(self) -> float:
        """Returns the score of a masked key, between twice `MASKED_SCORE` and `MASKED_SCORE`: finite, so that
        differences are not NaN.
        """
        return float(np.float32(self.exp2_factor) * np.float32(self.masked_product))

    @property
    def exp2_factor(self) -> float:
        """Returns the factor on scores in the exponential; 1 if they are scaled before."""
        return self.softmax_scale_log2 if self.softmax_scale_log2 >= MIN_SCORE_FACTOR else 1.0

    @property
    def num_thread_blocks(self) -> int:
        """Returns thread blocks."""
        return self.num_programs * self.tiles_per_item


def make_spec(record: PagedAttention, params: HopperLatent, rotary_start: int) -> LatentSpec:
    """Returns the constants of a record's kernel.

    Args:
        record: The canonical arguments, without new tokens.
        params: Programs.
        rotary_start: First of the rotary columns.

    Raises:
        ValueError: The configuration has no program.
    """
    if params.num_programs < 1:
        raise ValueError(f"cfg: got num_programs={params.num_programs}, wants at least 1")
    if params.max_growth_percent < 0:
        raise ValueError(f"cfg: got max_growth_percent={params.max_growth_percent}, wants 0 or more")
    rows, heads, _ = record.query.shape
    tiles, page_size = cdiv(heads, WGMMA_M), paged_cache.page_size(record)
    return LatentSpec(
        num_items=rows,
        stored_rows_per_item=heads,
        tiles_per_item=tiles,
        num_programs=max(1, params.num_programs // tiles),
        page_size=page_size,
        num_pages=paged_cache.page_count(record),
        pages_per_table_row=0 if record.block_tables is None else record.block_tables.shape[1],
        rotary_start=rotary_start,
        slots_per_copy=BLOCK_KV if record.block_tables is None else min(BLOCK_KV, page_size),
        has_key_starts=record.kv_starts is not None or causal_window_bounds(record)[0] is not None,
        softmax_scale_log2=record.softmax_scale * LOG2E,
        rescales_lazily=params.lazy_rescaling,
        dtype=jnp.dtype(record.query.dtype),
        value_scale=record.value_scale,
        stored_rows_per_tile=WGMMA_M if params.store_padding else min(heads, WGMMA_M),
        max_share_growth_percent=params.max_growth_percent,
    )


def refusal_reasons(record: PagedAttention) -> Iterable[str]:
    """Yields the reasons why the kernel cannot serve a paged record."""
    if record.latent is None:
        yield "the cache has separate keys and values; the kernel wants latent vectors"
        return
    size, rotary = record.latent[0], record.query.shape[-1] - record.latent[0]
    if (size, rotary) != (LATENT_DIM, ROTARY_DIM):
        yield f"latent vectors have {size} and {rotary} rotary columns; the kernel wants {LATENT_DIM} and {ROTARY_DIM}"
    if record.key_pages.dtype != record.query.dtype:
        cache_dtype, query_dtype = record.key_pages.dtype, record.query.dtype
        yield f"the cache has dtype {cache_dtype} and the queries {query_dtype}; the kernel wants the same"
    slots = paged_cache.page_size(record)
    if record.block_tables is not None and not (
        slots % BLOCK_KV == 0 or (BLOCK_KV % slots == 0 and slots >= SWIZZLE_ATOM_ROWS)
    ):
        yield (
            f"a page has {slots} slots; the kernel wants a multiple of {BLOCK_KV}, or a divisor of it of at least "
            f"{SWIZZLE_ATOM_ROWS}"
        )
    if record.latent[1] % 8 or record.key_pages.shape[-1] % 8:
        width = record.key_pages.shape[-1]
        yield f"rotary columns start at {record.latent[1]} in rows of {width}; the kernel wants multiples of 8 for both"
    if record.block_tables is None and slots % SWIZZLE_ATOM_ROWS:
        yield f"the cache has {slots} slots per sequence; the kernel wants a multiple of {SWIZZLE_ATOM_ROWS}"
    yield from _head_refusal_reasons(record.query.shape[1])


def _head_refusal_reasons(num_heads: int) -> Iterable[str]:
    if num_heads % SWIZZLE_ATOM_ROWS:
        yield f"the queries have {num_heads} heads; the kernel wants a multiple of {SWIZZLE_ATOM_ROWS}"


def decode_refusal_reasons(record: TiledAttention) -> Iterable[str]:
    """Yields the reasons why the kernel cannot serve a record of `mla_decode`."""
    keys, values, slots = record.key.shape[-1], record.value.shape[-1], record.key.shape[1]
    if keys != LATENT_DIM + ROTARY_DIM or values not in (LATENT_DIM, LATENT_DIM + ROTARY_DIM):
        key_dim = LATENT_DIM + ROTARY_DIM
        yield f"keys have {keys} columns and values {values}; the kernel wants {key_dim} and {LATENT_DIM}"
    if slots % SWIZZLE_ATOM_ROWS:
        yield f"the cache has {slots} slots per sequence; the kernel wants a multiple of {SWIZZLE_ATOM_ROWS}"
    yield from _head_refusal_reasons(record.query.shape[2])
