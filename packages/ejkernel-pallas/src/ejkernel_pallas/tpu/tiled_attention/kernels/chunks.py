"""The chunks of a tile pair, and the loops over them.

tile pair (block_q x block_kv)          one chunk = one product
+-------+-------+-------+               buffer 0   buffer 1
| c0    | c1    | c2    |  chunk_q      c0         c1
+-------+-------+-------+               c2         c3      ...
| c3    | c4    | c5    |               chunks alternate between two buffers, so that the compiler can
+-------+-------+-------+               overlap the product of one with the softmax of the other
 chunk_kv
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from jax import lax
from jax.experimental import pallas as pl

from ejkernel.arithmetic import cdiv
from ejkernel_pallas.tpu.mosaic.launch import Ref
from ejkernel_pallas.tpu.mosaic.vectors import LANES
from ejkernel_pallas.tpu.tiled_attention.plan import HAS_WORK_FLAG, MASKED_FLAG, read_pair_entry
from ejkernel_pallas.tpu.tiled_attention.spec import TiledSpec

DistinctRowsAndHeads = tuple[bool, bool]
"""Two flags: whether each batch row, and whether each head, has a separate list of tile pairs."""
MAX_DIAGONAL_CHUNK_SIZE = 256
"""The largest number of queries, and keys, of a chunk on the causal diagonal: small chunks have few masked pairs."""
MAX_UNROLLED_PAIRS = 2**20
"""The largest number of scores of a tile whose chunks are unrolled; larger tiles use a loop, for a short compile
time.
"""


class ScoreChunk(NamedTuple):
    """A part of a tile pair, the size of one product. Its scores are [queries, keys], or [keys, queries] if
    `accumulates_for_keys`.

    Attributes:
        entry: The tile pair's entry in the table.
        first_query: Index of the first query in the tile.
        num_queries: The number of queries.
        first_key: Index of the first key in the tile.
        num_keys: The number of keys.
        needs_mask: Whether some pair may be masked.
        spec: The kernel's constants.
        buffer_index: Which of the two scratch buffers the chunk uses, 0 or 1.
    """

    entry: Any
    first_query: Any
    num_queries: int
    first_key: Any
    num_keys: int
    needs_mask: bool
    spec: TiledSpec
    buffer_index: int = 0

    @property
    def query_slice(self) -> Any:
        """Returns the queries as a slice of the tile."""
        return pl.ds(self.first_query, self.num_queries)

    @property
    def key_slice(self) -> Any:
        """Returns the keys as a slice of the tile."""
        return pl.ds(self.first_key, self.num_keys)

    @property
    def shape(self) -> tuple[int, int]:
        """Returns the shape of the scores."""
        return (
            (self.num_keys, self.num_queries) if self.spec.accumulates_for_keys else (self.num_queries, self.num_keys)
        )

    def of(self, buffers: tuple[Ref, Ref]) -> Ref:
        """Returns the chunk's part of a double buffer in scratch memory."""
        return buffers[self.buffer_index].at[: self.shape[0], : self.shape[1]]


def current_entry(table: Any, distinct_rows_and_heads: DistinctRowsAndHeads) -> Any:
    """Returns the entry of the current step of a kernel whose grid is (batch rows, heads, tile pairs, ...)."""
    b, h, step = (pl.program_id(axis) for axis in range(3))
    return read_pair_entry(table, distinct_rows_and_heads, b, h, step, (pl.num_programs(1), pl.num_programs(2)))


def for_each_chunk(entry: Any, spec: TiledSpec, process_chunk: Callable[[ScoreChunk], None]) -> None:
    """Calls `process_chunk` with every chunk of a tile pair; chunks are masked if the pair is."""

    @pl.when((entry & (HAS_WORK_FLAG | MASKED_FLAG)) == HAS_WORK_FLAG)
    def _() -> None:
        _for_each_unmasked_chunk(entry, spec, process_chunk)

    if spec.needs_masks:

        @pl.when((entry & MASKED_FLAG) != 0)
        def _() -> None:
            for at in _list_chunks(entry, spec, (spec.block_q, spec.block_kv), masked=True):
                process_chunk(at)
    else:
        # Entries are positive, so this never runs. Without a second user of the scratch buffers, the compiler would
        # promote them to registers, which would then spill.
        @pl.when(entry < 0)
        def _() -> None:
            for parity in (0, 1):
                process_chunk(ScoreChunk(entry, 0, LANES, 0, LANES, False, spec, parity))


def _for_each_unmasked_chunk(entry: Any, spec: TiledSpec, process_chunk: Callable[[ScoreChunk], None]) -> None:
    """Calls `process_chunk` with every chunk of a full tile pair; a loop over the accumulated tile limits compile
    time.
    """
    if spec.block_q * spec.block_kv <= MAX_UNROLLED_PAIRS:
        for at in _list_chunks(entry, spec, (spec.block_q, spec.block_kv), masked=False):
            process_chunk(at)
        return
    stationary, size = ("first_key", spec.chunk_kv) if spec.accumulates_for_keys else ("first_query", spec.chunk_q)
    tile_shape = (spec.block_q, size) if spec.accumulates_for_keys else (size, spec.block_kv)

    def process_chunk_row(step: Any, carry: None) -> None:
        for at in _list_chunks(entry, spec, tile_shape, masked=False):
            process_chunk(at._replace(**{stationary: pl.multiple_of(step * size, LANES)}))

    lax.fori_loop(0, (spec.block_kv if spec.accumulates_for_keys else spec.block_q) // size, process_chunk_row, None)


def _list_chunks(entry: Any, spec: TiledSpec, tile_shape: tuple[int, int], masked: bool) -> list[ScoreChunk]:
    """Returns the chunks that cover the first queries and the first keys of a tile pair, `tile_shape` of them."""
    cut = masked and spec.cuts_diagonal_chunks
    chunk_q, chunk_kv = spec.chunk_q, spec.chunk_kv
    if cut and not spec.cuts_diagonal_by_keys and chunk_q > MAX_DIAGONAL_CHUNK_SIZE:
        chunk_q, chunk_kv = math.gcd(chunk_q, MAX_DIAGONAL_CHUNK_SIZE), math.gcd(chunk_kv, MAX_DIAGONAL_CHUNK_SIZE)
    chunks = [
        ScoreChunk(entry, query, chunk_q, key, chunk_kv, masked, spec)
        for query in range(0, tile_shape[0], chunk_q)
        for key in range(0, tile_shape[1], chunk_kv)
    ]
    if cut:
        chunks = [_cut_diagonal_chunk(at) for at in chunks if at.first_key < at.first_query + at.num_queries]
    return [at._replace(buffer_index=n % 2) for n, at in enumerate(chunks)]


def _cut_diagonal_chunk(at: ScoreChunk) -> ScoreChunk:
    """Returns a chunk on the diagonal without those masked pairs that fill whole lanes: early queries, or late keys."""
    at = at._replace(needs_mask=at.first_key + at.num_keys - 1 > at.first_query)
    if not at.spec.cuts_diagonal_by_keys:
        return at._replace(
            num_keys=min(at.num_keys, cdiv(at.first_query + at.num_queries - at.first_key, LANES) * LANES)
        )
    skipped = max(0, (at.first_key - at.first_query) // LANES * LANES)
    return at._replace(first_query=at.first_query + skipped, num_queries=at.num_queries - skipped)
