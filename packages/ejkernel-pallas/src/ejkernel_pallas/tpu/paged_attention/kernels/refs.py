"""The refs of the paged-attention kernel: arrays in HBM, what VMEM keeps, and scratch memory, each with its shape."""

import dataclasses
from typing import NamedTuple

from ejkernel_pallas.tpu.mosaic.launch import Ref


class Staged(NamedTuple):
    """Scratch memory for products that registers would not hold: of each two arrays, which alternate.

    Attributes:
        scores: float32 [rows, keys].
        weights: [rows, keys].
        alpha: float32 [rows, 128], factor on running sums, the same in every lane.
    """

    scores: tuple[Ref, Ref]
    weights: tuple[Ref, Ref]
    alpha: tuple[Ref, Ref]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedRefs:
    """Refs of the kernel; a field that is None is not needed.

    Attributes:
        items: The list of work, int32, in scalar memory.
        spans: First item of every part, likewise.
        tables: Page tables, likewise.
        query: [Hk, rows, D], in HBM.
        keys: Pages of keys, or of keys and values, in HBM; `values`, of values, or of the rotary part of latent keys.
        keys_before: The input whose memory `keys` is, where it is written to; not read. Likewise `values_before`.
        new_keys: New tokens, in HBM; likewise `new_values`.
        output: [Hk, rows, Dv], in HBM.
        lse: [items, Hk, 1, rows of a tile], in HBM.
        sinks: [Hk, rows of a tile, 128], as powers of two.
        row_tokens: int32 [rows of a tile, 128]: the token of each row, in the tile.
        query_buffer: Scratch, [2, Hk, rows of a tile, D]; likewise `output_buffer` and `lse_buffer`.
        row_max: Scratch, [Hk, rows of a tile, 128], the same in every lane.
        row_sum: Scratch, likewise; a partial sum in every lane.
        acc: Scratch, [Hk, rows of a tile, Dv].
        small: Scratch of products of few rows.
        large: Scratch of products of many rows.
        score_limits: Scratch, float32: upper limits of scores, -inf where a key is not the row's own head's.
        key_mask: Scratch, float32 [rounds, keys]: additive mask of items that have one token.
        keys_buffer: Scratch, blocks of keys; `values_buffer`, of values.
        head_keys: Scratch, [Hk, part, D]; likewise `head_values`.
        query_arrived: DMA semaphores, one per query buffer.
        results_sent: DMA semaphores, one an output buffer.
        pages_arrived: DMA semaphores, one per block buffer.
        write_counts: int32 [2] in scalar memory: pages, and single tokens, whose copies to the cache were started.
        tokens_written: DMA semaphore.
    """

    items: Ref
    spans: Ref
    tables: Ref
    query: Ref
    keys: Ref
    output: Ref
    lse: Ref
    query_buffer: Ref
    output_buffer: Ref
    lse_buffer: Ref
    row_max: Ref
    row_sum: Ref
    acc: Ref
    small: Staged
    keys_buffer: Ref
    query_arrived: Ref
    results_sent: Ref
    pages_arrived: Ref
    large: Staged | None = None
    values: Ref = None
    values_buffer: Ref = None
    keys_before: Ref = None
    values_before: Ref = None
    new_keys: Ref = None
    new_values: Ref = None
    sinks: Ref = None
    row_tokens: Ref = None
    score_limits: Ref = None
    key_mask: Ref = None
    head_keys: Ref = None
    head_values: Ref = None
    write_counts: Ref = None
    tokens_written: Ref = None

    @property
    def caches(self) -> tuple[tuple[Ref, Ref], ...]:
        """Returns pages of each cache, and the buffer of its blocks."""
        pairs = ((self.keys, self.keys_buffer), (self.values, self.values_buffer))
        return tuple(pair for pair in pairs if pair[0] is not None)

    @property
    def buffers(self) -> tuple[Ref, ...]:
        """Returns the buffers of keys and of values, or of both together."""
        return tuple(buffer for _, buffer in self.caches)

    @property
    def written(self) -> tuple[tuple[Ref, Ref], ...]:
        """Returns new tokens, and the pages that they are written to."""
        pairs = ((self.new_keys, self.keys), (self.new_values, self.values))
        return tuple(pair for pair in pairs if pair[1] is not None)
