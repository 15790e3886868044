"""The refs of the paged-attention kernel, each with its shape: arrays in HBM, arrays in VMEM, and scratch memory."""

import dataclasses
from typing import NamedTuple

from ejkernel_pallas.tpu.mosaic.launch import Ref


class ProductBuffers(NamedTuple):
    """Scratch memory for products that do not fit registers: two arrays of each kind, used alternately.

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
    """Refs of the kernel; fields that are not needed are None.

    Attributes:
        work_items: The work list, int32, in scalar memory.
        first_item_of_core: int32, in scalar memory: the first item of every core, and the number of items.
        page_table: int32, in scalar memory: the pages of every sequence.
        query: [Hk, rows, D], in HBM.
        keys: Pages of keys, or of keys and values, in HBM. `values` has pages of values, or the rotary part of latent
            keys.
        keys_before: The input that shares memory with `keys` if new tokens are written; not read. Same for
            `values_before`.
        key_signs: Pages of signs of a cache of codes, in HBM; `key_norms` and `value_norms` have those of norms.
        key_table: float32 [16, 128], the codebook of keys, the same in every lane; `value_table` has that of values.
        new_keys: New tokens, in HBM; same for `new_values`.
        output: [Hk, rows, Dv], in HBM.
        lse: [items, Hk, 1, rows of a tile], in HBM.
        sinks: [Hk, rows of a tile, 128], in the unit of the softmax.
        alibi_slopes: [Hk, rows of a tile, 128]: the slope of each row's head, in the unit that scores have where it is
            added.
        context_lengths: int32 [N], tokens of each sequence before its queries, in scalar memory.
        token_of_row: int32 [rows of a tile, 128]: the token of each row, in the tile.
        pair_bias: float32 [tokens, 1, columns], in HBM: the bias for pairs of new tokens, a row per token of the packed
            queries, in the unit of scores. `PagedSpec.pair_bias_columns` follow `block_kv` columns of zeros.
        row_positions: int32 [rows, 128], in HBM: the position of each row in its sequence, the same in every lane.
        row_contexts: float32 [rows, 128], in HBM: the tokens before the queries of each row's sequence.
        function_rows_by_head: int32 [Hk, two periods of rows, 128 per value]: values of functions, the same in 128
            lanes, as listed by `mosaic.paged_functions`. `function_rows_by_query` [planes, rows, 128], a plane each,
            and `function_rows_by_key` [N|1, lines, 1, keys], a line each, are in HBM.
        query_buffer: Scratch, [2, Hk, rows of a tile, D]; same for `output_buffer` and `lse_buffer`.
        row_max: Scratch, [Hk, rows of a tile, 128], the same in every lane.
        row_sum: Scratch, [Hk, rows of a tile, 128]; a partial sum in every lane.
        acc: Scratch, [Hk, rows of a tile, Dv].
        small_product_buffers: Scratch memory of products of few rows.
        large_product_buffers: Scratch memory of products of many rows.
        score_limits: Scratch, float32: upper limits of scores, -inf where a key belongs to another head than the row.
        key_mask: Scratch, float32 [rounds, keys]: additive mask of items that have one token.
        keys_buffer: Scratch, blocks of keys; `values_buffer` has blocks of values.
        key_signs_buffer: Scratch, blocks of signs; same for `key_norms_buffer` and `value_norms_buffer`.
        value_norm_rows: Scratch, float32 [Hk, block_kv]: the norms of the values of the block that is computed.
        pair_bias_buffer: Scratch, float32 [3, tokens of a tile, 1, block_kv + 128]: the columns of the bias that the
            keys of a block have, from a multiple of 128 on.
        row_bias: Scratch, float32 [chunks, rows of a tile, keys]: the bias of each row and key of a product; one row
            per chunk if a tile has one token.
        position_buffer: Scratch, int32 [2, rows of a tile, 128]; same for `context_buffer`.
        function_queries_buffer: Scratch, int32 [2, planes, rows of a tile, 128]: functions' values of the rows.
        function_keys_buffer: Scratch, int32 [3, lines, 1, block_kv]: the functions' values of a block's keys.
        head_keys: Scratch, [Hk, part, D]; same for `head_values`.
        query_arrived: DMA semaphores, one per query buffer.
        results_sent: DMA semaphores, one per output buffer.
        pages_arrived: DMA semaphores, one per block buffer.
        pair_bias_arrived: DMA semaphores, one per block buffer; same for `function_keys_arrived`.
        write_counts: int32 [2] in scalar memory: how many pages and how many single tokens have copies to the cache
            that have started.
        tokens_written: DMA semaphore.
    """

    work_items: Ref
    first_item_of_core: Ref
    page_table: Ref
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
    small_product_buffers: ProductBuffers
    keys_buffer: Ref
    query_arrived: Ref
    results_sent: Ref
    pages_arrived: Ref
    large_product_buffers: ProductBuffers | None = None
    values: Ref = None
    values_buffer: Ref = None
    key_signs: Ref = None
    key_norms: Ref = None
    value_norms: Ref = None
    key_signs_buffer: Ref = None
    key_norms_buffer: Ref = None
    value_norms_buffer: Ref = None
    key_table: Ref = None
    value_table: Ref = None
    value_norm_rows: Ref = None
    keys_before: Ref = None
    values_before: Ref = None
    new_keys: Ref = None
    new_values: Ref = None
    sinks: Ref = None
    alibi_slopes: Ref = None
    context_lengths: Ref = None
    token_of_row: Ref = None
    pair_bias: Ref = None
    row_positions: Ref = None
    row_contexts: Ref = None
    function_rows_by_head: Ref = None
    function_rows_by_query: Ref = None
    function_rows_by_key: Ref = None
    score_limits: Ref = None
    key_mask: Ref = None
    pair_bias_buffer: Ref = None
    row_bias: Ref = None
    position_buffer: Ref = None
    context_buffer: Ref = None
    function_queries_buffer: Ref = None
    function_keys_buffer: Ref = None
    head_keys: Ref = None
    head_values: Ref = None
    pair_bias_arrived: Ref = None
    function_keys_arrived: Ref = None
    write_counts: Ref = None
    tokens_written: Ref = None

    @property
    def caches_and_buffers(self) -> tuple[tuple[Ref, Ref], ...]:
        """Returns, for each cache, its pages in HBM and the buffer in VMEM to which blocks of them are copied."""
        pairs = (
            (self.keys, self.keys_buffer),
            (self.values, self.values_buffer),
            (self.key_signs, self.key_signs_buffer),
            (self.key_norms, self.key_norms_buffer),
            (self.value_norms, self.value_norms_buffer),
        )
        return tuple(pair for pair in pairs if pair[0] is not None)

    @property
    def buffers(self) -> tuple[Ref, ...]:
        """Returns the buffers of keys and values, and those of the signs and norms of codes."""
        return tuple(buffer for _, buffer in self.caches_and_buffers)

    @property
    def new_tokens_and_pages(self) -> tuple[tuple[Ref, Ref], ...]:
        """Returns the new tokens, and the pages that they are written to."""
        pairs = ((self.new_keys, self.keys), (self.new_values, self.values))
        return tuple(pair for pair in pairs if pair[1] is not None)
