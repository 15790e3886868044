"""The compile-time constants of the latent kernel, and its refusals."""

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
"""Rotary key columns."""
CHUNK = 64
"""Contiguous columns in shared memory: one row of the 128-byte swizzle."""
CHUNKS = HALF // CHUNK
"""Chunks per half."""
PIECES = 2
"""Pieces per half, of whole chunks, with separate mbarriers: the product with one runs while the next is copied."""
BLOCK_KV = 64
"""Keys per block: one consumer warpgroup multiplies the queries with them."""
UNIT = 2 * BLOCK_KV
"""Keys per step: a block for each of the two consumer warpgroups."""
GROUP = 8
"""Rows per swizzle atom of shared memory: the smallest copy."""
WARPGROUPS = 2
"""Consumer warpgroups."""
SLACK = 8.0
"""How far, in base 2, a row's maximum may be below its largest score: weights are at most 256."""
LOWEST = -1e30
"""The maximum of no scores, and approximately a masked score: finite, so that differences are not NaN."""
SMALLEST_FACTOR = 1e-6
"""The smallest factor on scores for which a masked product is finite in float32, with a margin."""
REGISTERS = (240, 24)
"""Registers per thread of the consumer warpgroups, and of the producer's."""


class ScheduledSpec(Protocol):
    """The constants that copying, looping over and merging the items of a schedule read, named as in `LatentSpec`."""

    @property
    def rows(self) -> int:
        """Number of items."""
        ...

    @property
    def heads(self) -> int:
        """Rows of an item's tiles that are stored."""
        ...

    @property
    def tiles(self) -> int:
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
    def pages(self) -> int:
        """Number of pages of the cache."""
        ...

    @property
    def columns(self) -> int:
        """Entries per block table; 0 if sequence n has page n."""
        ...

    @property
    def copied(self) -> int:
        """Slots per copy."""
        ...


@dataclasses.dataclass(frozen=True)
class LatentSpec:
    """Constants of the kernel.

    Attributes:
        rows: Query rows of the call.
        heads: Query heads.
        tiles: Tiles of 64 heads.
        programs: Programs over which the key blocks are distributed, for each tile of heads.
        page_size: Slots per page.
        pages: Pages of the cache.
        columns: Entries per block table; 0 if sequence n has page n.
        start: First of the rotary columns in their array.
        copied: Rows per copy.
        started: Whether sequences have first keys other than 0, by `kv_starts` or a window.
        exponent: Factor that converts products to base 2.
        lazy: Whether a row's maximum moves only if scores exceed it by `SLACK`.
        dtype: Dtype of queries, cache and output.
        value_scale: Factor on the output.
        stored: Rows of a tile that are stored and merged: 64, or the heads of a single tile.
        growth: Percent by which a share may grow so that no item is split.
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
        """Returns the value of a masked product: a power of two, so that scaling it is exact."""
        return -(2.0 ** math.ceil(math.log2(-LOWEST / self.factor)))

    @property
    def lowest(self) -> float:
        """Returns the score of a masked key, between twice `LOWEST` and `LOWEST`: finite, so that differences are
        not NaN.
        """
        return float(np.float32(self.factor) * np.float32(self.masked))

    @property
    def factor(self) -> float:
        """Returns the factor on scores in the exponential; 1 if they are scaled before."""
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
        ValueError: The configuration has no program.
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
    """Yields the reasons why the kernel cannot serve a paged record."""
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
    """Yields the reasons why the kernel cannot serve a record of `mla_decode`."""
    keys, values, slots = record.key.shape[-1], record.value.shape[-1], record.key.shape[1]
    if keys != LATENT + ROTARY or values not in (LATENT, LATENT + ROTARY):
        yield f"keys of {keys} columns and values of {values} are not {LATENT} + {ROTARY} and {LATENT}"
    if slots % GROUP:
        yield f"a cache of {slots} slots a sequence is no multiple of {GROUP}"
    yield from _head_reasons(record.query.shape[2])
