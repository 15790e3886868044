"""What the latent kernel is compiled for, and what it refuses."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np

from ejkernel.arithmetic import LOG2E, cdiv
from ejkernel.families.paged_attention import PagedAttention, band
from ejkernel.families.paged_attention import pages as paged_cache
from ejkernel.families.tiled_attention import TiledAttention
from ejkernel_pallas.gpu.hopper.sizes import WGMMA_M
from ejkernel_pallas.gpu.latent_attention.config import HopperLatent

LATENT = 512
"""Columns of a latent vector."""
HALF = LATENT // 2
"""Columns of the output that one consumer warpgroup accumulates."""
ROTARY = 64
"""Key columns beside it."""
CHUNK = 64
"""Columns that lie together in shared memory: one row of the 128-byte swizzle."""
CHUNKS = HALF // CHUNK
"""Chunks of a half."""
PIECES = 2
"""Parts of a half, of whole chunks, that are awaited apart: the product with a part runs while the next is copied."""
BLOCK_KV = 64
"""Keys of a block: one consumer warpgroup multiplies the queries with them."""
UNIT = 2 * BLOCK_KV
"""Keys of a step: a block for each of the two consumer warpgroups."""
GROUP = 8
"""Rows of shared memory that lie together, at least that many one copy has."""
WARPGROUPS = 2
"""Consumer warpgroups."""
SLACK = 8.0
"""How far, as a power of two, a row's maximum may lie below its largest score: weights are at most 256."""
LOWEST = -1e30
"""The maximum of no scores, and a masked score, about: finite, so that differences are no NaN."""
SMALLEST_FACTOR = 1e-6
"""The smallest factor on scores for which a masked product is finite in float32, with room to spare."""
REGISTERS = (240, 24)
"""Registers of a thread of a consumer warpgroup, and of the producer's."""


class ScheduledSpec(Protocol):
    """What copying, walking and merging the items of a schedule read of constants, named as `LatentSpec`'s."""

    @property
    def rows(self) -> int:
        """Items."""
        ...

    @property
    def heads(self) -> int:
        """Rows of an item's tiles that are kept."""
        ...

    @property
    def tiles(self) -> int:
        """Tiles of 64 rows of an item."""
        ...

    @property
    def dtype(self) -> Any:
        """Dtype of the output."""
        ...

    @property
    def page_size(self) -> int:
        """Slots of a page."""
        ...

    @property
    def pages(self) -> int:
        """Pages of the cache."""
        ...

    @property
    def columns(self) -> int:
        """Entries of a block table; 0 where each sequence has the page of its own number."""
        ...

    @property
    def copied(self) -> int:
        """Slots that one copy has."""
        ...


@dataclasses.dataclass(frozen=True)
class LatentSpec:
    """Constants of the kernel.

    Attributes:
        rows: Query rows of the call.
        heads: Query heads.
        tiles: Tiles of 64 heads.
        programs: Programs over which the key blocks are distributed, for each tile of heads.
        page_size: Slots of a page.
        pages: Pages of the cache.
        columns: Entries of a block table; 0 where each sequence has the page of its own number.
        start: First of the rotary columns in their array.
        copied: Rows that one copy has.
        started: Whether sequences begin at keys of their own, or a window has them begin later.
        exponent: Factor that makes products powers of two.
        lazy: Whether a row's maximum moves only where scores are `SLACK` above it.
        dtype: Of queries, cache and output.
        value_scale: Factor on the output.
        stored: Rows of a tile that are written and merged, 64 or the heads of the only tile.
        growth: Percent by which a share may grow so that no item is cut.
    """

    rows: int
    heads: int
    tiles: int
    programs: int
    page_size: int
    pages: int
    columns: int
    start: int
    copied: int
    started: bool
    exponent: float
    lazy: bool
    dtype: Any
    value_scale: float
    stored: int
    growth: int

    @property
    def masked(self) -> float:
        """Returns what stands for a product with a masked key: a power of two, so that scaling it is exact."""
        return -(2.0 ** math.ceil(math.log2(-LOWEST / self.factor)))

    @property
    def lowest(self) -> float:
        """Returns the score of a masked key, between twice `LOWEST` and it: finite, so that differences are no NaN."""
        return float(np.float32(self.factor) * np.float32(self.masked))

    @property
    def factor(self) -> float:
        """Returns factor on scores where they become powers; 1 if they have to be scaled before."""
        return self.exponent if self.exponent >= SMALLEST_FACTOR else 1.0

    @property
    def blocks(self) -> int:
        """Returns thread blocks."""
        return self.programs * self.tiles


def make_spec(record: PagedAttention, params: HopperLatent, start: int) -> LatentSpec:
    """Returns the constants of a record's kernel.

    Args:
        record: The canonical arguments, without new tokens.
        params: Programs.
        start: First of the rotary columns.

    Raises:
        ValueError: There is no program.
    """
    if params.num_programs < 1:
        raise ValueError(f"num_programs={params.num_programs}: wants at least 1")
    if params.growth < 0:
        raise ValueError(f"growth={params.growth}: wants 0 or more")
    rows, heads, _ = record.query.shape
    tiles, page_size = cdiv(heads, WGMMA_M), paged_cache.page_size(record)
    return LatentSpec(
        rows=rows,
        heads=heads,
        tiles=tiles,
        programs=max(1, params.num_programs // tiles),
        page_size=page_size,
        pages=paged_cache.page_count(record),
        columns=0 if record.block_tables is None else record.block_tables.shape[1],
        start=start,
        copied=BLOCK_KV if record.block_tables is None else min(BLOCK_KV, page_size),
        started=record.kv_starts is not None or band(record)[0] is not None,
        exponent=record.softmax_scale * LOG2E,
        lazy=params.lazy_rescaling,
        dtype=jnp.dtype(record.query.dtype),
        value_scale=record.value_scale,
        stored=WGMMA_M if params.store_padding else min(heads, WGMMA_M),
        growth=params.growth,
    )


def reasons(record: PagedAttention) -> Iterable[str]:
    """Yields why the kernel cannot serve a paged record, a sentence each."""
    if record.latent is None:
        yield "the cache has no latent vectors"
        return
    size, rotary = record.latent[0], record.query.shape[-1] - record.latent[0]
    if (size, rotary) != (LATENT, ROTARY):
        yield f"a latent size of {size} and {rotary} rotary columns are not {LATENT} and {ROTARY}"
    if record.key_pages.dtype != record.query.dtype:
        yield f"a cache of {record.key_pages.dtype} beside queries of {record.query.dtype}"
    slots = paged_cache.page_size(record)
    if record.block_tables is not None and not (slots % BLOCK_KV == 0 or (BLOCK_KV % slots == 0 and slots >= GROUP)):
        yield f"pages of {slots} slots are neither a multiple of {BLOCK_KV} nor a divisor of at least {GROUP}"
    if record.latent[1] % 8 or record.key_pages.shape[-1] % 8:
        width = record.key_pages.shape[-1]
        yield f"rotary columns from {record.latent[1]} on in rows of {width}: copies want multiples of 8"
    if record.block_tables is None and slots % GROUP:
        yield f"a cache of {slots} slots a sequence is no multiple of {GROUP}"
    yield from _head_reasons(record.query.shape[1])


def _head_reasons(heads: int) -> Iterable[str]:
    if heads % GROUP:
        yield f"{heads} heads are no multiple of {GROUP}"


def decode_reasons(record: TiledAttention) -> Iterable[str]:
    """Yields why the kernel cannot serve a record of `mla_decode`, a sentence each."""
    keys, values, slots = record.key.shape[-1], record.value.shape[-1], record.key.shape[1]
    if keys != LATENT + ROTARY or values not in (LATENT, LATENT + ROTARY):
        yield f"keys of {keys} columns and values of {values} are not {LATENT} + {ROTARY} and {LATENT}"
    if slots % GROUP:
        yield f"a cache of {slots} slots a sequence is no multiple of {GROUP}"
    yield from _head_reasons(record.query.shape[2])
