"""Attends to one key block: updates the online softmax of a work item's rows, chunk by chunk.

block_kv keys in a buffer slot
├─ step: chunks_per_step chunks of chunk_kv keys, few rows of all heads (decode)   _attend_small
└─ chunk of chunk_kv keys, cut into parts of part_kv keys (prefill)                _attend_large
"""

import functools
import operator
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ejkernel_pallas.tpu.mosaic.division import divide
from ejkernel_pallas.tpu.mosaic.loops import for_each_index, fori_loop
from ejkernel_pallas.tpu.paged_attention.kernels import copies, pair_bias, pair_functions
from ejkernel_pallas.tpu.paged_attention.kernels.copies import KeyBlock, WorkItem
from ejkernel_pallas.tpu.paged_attention.kernels.load_codes import load_codes, make_code_chunk, store_value_norms
from ejkernel_pallas.tpu.paged_attention.kernels.load_keys import (
    KeyChunk,
    load_head_group,
    load_rotary,
    num_head_groups,
)
from ejkernel_pallas.tpu.paged_attention.kernels.online_softmax import (
    HeadChunk,
    ProductRows,
    ScoreMask,
    key_offsets_from_context,
    make_score_mask,
    store_additive_mask_of_one_token,
    update_softmax,
)
from ejkernel_pallas.tpu.paged_attention.kernels.refs import PagedRefs
from ejkernel_pallas.tpu.paged_attention.spec import PagedSpec

HEADS_PER_STEP, EQUAL_HEADS_PER_STEP = 4, 8
"""The number of heads whose products of many rows are interleaved, and of those that are interleaved where all products
are equal and smaller: enough independent products to hide the MXU's latency.
"""


def call_with_row_count(has_few_rows: Any, spec: PagedSpec, body: Callable[[int], None]) -> None:
    """Calls `body` with the number of rows to compute: the smallest product's if the item's rows fit it, else a whole
    tile's.
    """
    if spec.rows_per_tile == spec.smallest_product_rows:
        body(spec.smallest_product_rows)
        return

    @pl.when(has_few_rows)
    def _() -> None:
        body(spec.smallest_product_rows)

    @pl.when(jnp.logical_not(has_few_rows))
    def _() -> None:
        body(spec.rows_per_tile)


def attend_block(
    refs: PagedRefs,
    block: KeyBlock,
    prefetched_block: KeyBlock,
    has_prefetched_block: Any,
    buffer_slot: Any,
    spec: PagedSpec,
) -> None:
    """Starts the copies of the block `prefetched_block`, if there is one, and attends to the chunks of `block`.

    If the whole block is attended, and the next block's pages begin at its first slot and are all present, copies are
    started between vector instructions. Each start takes about four cycles of the scalar unit, which is idle there.
    """
    in_one_step = jnp.bool_(False)
    if spec.computes_blocks_in_one_step:
        in_one_step = _needs_no_mask(
            refs, block.item, block.index_in_sequence * spec.block_kv, spec.chunk_kv * spec.chunks_per_step, spec
        )
        if spec.num_copy_slices:
            in_one_step = (
                in_one_step & (prefetched_block.item.missing_pages == 0) & (prefetched_block.page_range(spec)[0] == 0)
            )
    starts_between = in_one_step if spec.num_copy_slices else jnp.bool_(False)
    size = spec.chunk_kv * (
        max(1, spec.chunks_per_step // 2) if spec.computes_blocks_in_one_step else spec.chunks_per_step
    )
    base, item = block.index_in_sequence * spec.block_kv, block.item
    # Chunks that no row attends, at either end of a sequence, are skipped.
    first = jnp.clip(divide(item.first_key - base, size), 0, spec.block_kv // size)
    end = jnp.clip(divide(item.end_key - base + size - 1, size), first, spec.block_kv // size)

    @pl.when(has_prefetched_block & jnp.logical_not(starts_between))
    def _() -> None:
        copies.start_page_copies(refs, prefetched_block, spec)

    if spec.pair_bias_columns:
        pl.when(has_prefetched_block)(lambda: pair_bias.copy_pair_bias(refs, prefetched_block, spec, wait=False))
        pair_bias.copy_pair_bias(refs, block, spec, wait=True)
    if refs.function_rows_by_key is not None:
        pl.when(has_prefetched_block)(lambda: pair_functions.copy_key_rows(refs, prefetched_block, spec, wait=False))
        pair_functions.copy_key_rows(refs, block, spec, wait=True)
    copies.wait_for_page_copies(refs, block, (first * size, end * size), spec)

    if spec.computes_blocks_in_one_step:
        count = spec.num_copy_slices
        pieces = (
            copies.sliced_page_copy_starts(refs, prefetched_block, has_prefetched_block, count, spec)
            if count
            else iter(())
        )
        pl.when(in_one_step)(
            lambda: _attend_few_rows(
                refs, block, buffer_slot, _key_chunks_of_step(block, 0, spec.chunks_per_step, False, spec), pieces, spec
            )
        )

    def attend_step(k: jax.Array, carry: jax.Array) -> jax.Array:
        _attend_chunks(refs, block, buffer_slot, (pl.multiple_of(k * size, size), size // spec.chunk_kv), spec)
        return carry

    fori_loop(jnp.where(in_one_step, end, first), end, attend_step, jnp.int32(0))


def _key_chunks_of_step(block: KeyBlock, start: Any, count: int, masked: bool, spec: PagedSpec) -> list[KeyChunk]:
    """Returns the `count` chunks that one step computes, beginning at key `start` of the block."""
    item, base = block.item, block.index_in_sequence * spec.block_kv
    offsets = [pl.multiple_of(start + k * spec.chunk_kv, spec.chunk_kv) for k in range(count)]
    return [
        KeyChunk(block.buffer_slot, x, base + x, item.first_key, item.end_key, masked, spec.chunk_kv) for x in offsets
    ]


def _needs_no_mask(refs: PagedRefs, item: WorkItem, key: Any, size: int, spec: PagedSpec) -> Any:
    """Returns whether all rows of an item attend all of the `size` keys from `key` on, without a bias for pairs."""
    if spec.has_row_positions:  # rows of a tile have windows and chunks of their own
        return jnp.bool_(False)
    last, end = item.first_position + item.num_tokens - 1, key + size
    low = item.first_key if spec.window_left is None else jnp.maximum(item.first_key, last - spec.window_left)
    high = (
        item.end_key
        if spec.window_right is None
        else jnp.minimum(item.end_key, item.first_position + spec.window_right + 1)
    )
    if spec.attention_chunk is not None:
        size_of_chunk = spec.attention_chunk
        low = jnp.maximum(low, divide(last, size_of_chunk) * size_of_chunk)
        high = jnp.minimum(high, (divide(item.first_position, size_of_chunk) + 1) * size_of_chunk)
    plain = (key >= low) & (end <= high) & (item.missing_pages == 0)
    if spec.pair_bias_columns:
        plain &= jnp.logical_not(pair_bias.keys_have_pair_bias(refs, item, key, size, spec))
    return plain


def _attend_chunks(
    refs: PagedRefs, block: KeyBlock, buffer_slot: Any, chunks: tuple[Any, int], spec: PagedSpec
) -> None:
    """Attends to chunks; `chunks` is the first key and the number of chunks."""
    item, (start, count) = block.item, chunks
    if spec.has_equal_products:  # the same instructions for prompts and decoding
        _attend_whole_tile(refs, block, buffer_slot, start, spec)
        return
    # A scalar test per chunk decides whether to mask: the mask costs more than the test.
    first_key, num_keys = block.index_in_sequence * spec.block_kv + start, count * spec.chunk_kv
    plain = _needs_no_mask(refs, item, first_key, num_keys, spec)

    def attend_few_rows(masked: bool, has_pair_bias: bool = False) -> None:
        step = _key_chunks_of_step(block, start, count, masked, spec)
        step = [chunk._replace(has_pair_bias=has_pair_bias) for chunk in step]
        _attend_few_rows(refs, block, buffer_slot, step, iter(()), spec)

    def attend_few_masked_rows() -> None:
        if not spec.pair_bias_columns:
            attend_few_rows(True)
            return
        biased = pair_bias.keys_have_pair_bias(refs, item, first_key, num_keys, spec)
        pl.when(biased)(lambda: attend_few_rows(True, True))
        pl.when(jnp.logical_not(biased))(lambda: attend_few_rows(True))

    if spec.rows_per_tile == spec.smallest_product_rows:
        if not spec.computes_blocks_in_one_step:
            pl.when(plain)(lambda: attend_few_rows(False))
        pl.when(jnp.logical_not(plain & (not spec.computes_blocks_in_one_step)))(attend_few_masked_rows)
        return

    @pl.when(item.num_tokens * spec.group_size > spec.smallest_product_rows)
    def _() -> None:
        _attend_whole_tile(refs, block, buffer_slot, start, spec)

    pl.when(item.num_tokens * spec.group_size <= spec.smallest_product_rows)(attend_few_masked_rows)


def _attend_few_rows(
    refs: PagedRefs,
    block: KeyBlock,
    buffer_slot: Any,
    chunks: list[KeyChunk],
    copy_starts: Iterator[Callable[[], None]],
    spec: PagedSpec,
) -> None:
    """Attends with few rows of all heads (decode), and calls one function of `copy_starts` after each slice that it
    loads.
    """
    rows = ProductRows(buffer_slot, 0, spec.smallest_product_rows, block.item.first_position)
    if chunks[0].needs_mask and spec.tokens_per_tile == 1:
        store_additive_mask_of_one_token(refs, block.item, chunks, spec)
    if chunks[0].has_pair_bias:
        for n, chunk in enumerate(chunks):
            pair_bias.store_row_bias(refs, block.item, chunk, n, spec)
    if spec.cache_layout.codes is not None:
        store_value_norms(refs, chunks[0], len(chunks) * spec.chunk_kv)
    chunk_masks = [make_score_mask(refs, block.item, rows, at, n, spec) for n, at in enumerate(chunks)]
    chunk_columns = [key_offsets_from_context(refs, block.item, at, spec) for at in chunks]
    heads = spec.kv_heads // num_head_groups(spec)

    def attend_head_group(k: Any) -> None:
        def load_tiles(at: KeyChunk, values: bool) -> list[jax.Array]:
            if spec.cache_layout.codes is not None:
                return [load_codes(refs, k, at, spec, values=values)]
            return load_head_group(
                refs.buffers, k, at, spec, values=values, after_each_slice=lambda: next(copy_starts, _do_nothing)()
            )

        def make_head_chunks(
            step: int, at: KeyChunk, mask: ScoreMask | None, columns: jax.Array | None
        ) -> list[HeadChunk]:
            bias = step if at.has_pair_bias else None
            keys, values = (functools.cache(partial(load_tiles, at, is_values)) for is_values in (False, True))
            rotary = partial(load_rotary, refs.buffers, at, spec) if spec.cache_layout.rotary_dim else None
            codes = None if spec.cache_layout.codes is None else make_code_chunk(refs, k, at, spec)
            positions = pair_functions.key_positions(at, spec)
            return [
                HeadChunk(
                    k * heads + n,
                    rows,
                    _make_head_loader(keys, n),
                    _make_head_loader(values, n),
                    mask,
                    rotary,
                    columns,
                    bias,
                    codes,
                    at,
                    positions,
                )
                for n in range(heads)
            ]

        chunks_with_masks = zip(range(len(chunks)), chunks, chunk_masks, chunk_columns, strict=True)
        lookahead = spec.masked_lookahead if chunks[0].needs_mask else spec.lookahead
        update_softmax(
            refs,
            [chunk for chunk_arguments in chunks_with_masks for chunk in make_head_chunks(*chunk_arguments)],
            lookahead,
            spec,
        )
        for start_copies in copy_starts:
            start_copies()

    for_each_index(num_head_groups(spec), attend_head_group)


def _do_nothing() -> None:
    pass


def _make_head_loader(load_tiles: Callable[[], list[jax.Array]], n: int) -> Callable[[], jax.Array]:
    """Returns a loader of head n. Several heads share words, so the first call loads all of them and later calls
    reuse them.
    """
    return lambda: load_tiles()[n]


def _attend_whole_tile(refs: PagedRefs, block: KeyBlock, buffer_slot: Any, start: Any, spec: PagedSpec) -> None:
    """Attends with a whole tile of rows (prefill). Copies each head's keys to contiguous scratch memory for its many
    products.
    """
    (chunk,) = _key_chunks_of_step(block, start, 1, True, spec)
    heads, item = spec.kv_heads // num_head_groups(spec), block.item

    def attend_key_part(n: Any) -> None:
        offset = pl.multiple_of(n * spec.part_kv, spec.part_kv)
        at = chunk._replace(
            start_in_buffer=pl.multiple_of(start + offset, spec.part_kv),
            first_key=chunk.first_key + offset,
            num_keys=spec.part_kv,
        )

        def copy_head_group(k: Any) -> None:
            for target, values in ((refs.head_keys, False), (refs.head_values, True)):
                for head, rows in enumerate(load_head_group(refs.buffers, k, at, spec, values=values)):
                    target[k * heads + head] = rows

        @pl.when((at.first_key < item.end_key) & (at.first_key + at.num_keys > item.first_key))
        def _() -> None:
            for_each_index(num_head_groups(spec), copy_head_group)
            plain = _needs_no_mask(refs, item, at.first_key, at.num_keys, spec)
            if not spec.has_equal_products:
                # In a tile with few tokens a large product would be spent mostly on rows without a token.
                plain &= 2 * item.num_tokens * spec.group_size > spec.unmasked_product_rows
            biased = jnp.bool_(False)
            if spec.pair_bias_columns:
                biased = pair_bias.keys_have_pair_bias(refs, item, at.first_key, at.num_keys, spec)
                pl.when(biased)(lambda: pair_bias.store_row_bias(refs, item, at, 0, spec))
                attend_if(at._replace(needs_mask=True, has_pair_bias=True), biased)
            attend_if(at._replace(needs_mask=False), plain)
            attend_if(at._replace(needs_mask=True), jnp.logical_not(plain | biased))

    def attend_if(at: KeyChunk, condition: Any) -> None:
        pl.when(condition)(partial(_attend_contiguous_heads, refs, item, buffer_slot, at, spec))

    for_each_index(spec.chunk_kv // spec.part_kv, attend_key_part)


def _attend_contiguous_heads(
    refs: PagedRefs, item: WorkItem, buffer_slot: Any, key_chunk: KeyChunk, spec: PagedSpec
) -> None:
    """Attends to keys in scratch memory, with as many rows and heads at once as fill the MXU."""
    size = spec.masked_product_rows if key_chunk.needs_mask else spec.unmasked_product_rows
    # Products of few rows are too short to hide their latency without others.
    most_heads = EQUAL_HEADS_PER_STEP if spec.has_equal_products else HEADS_PER_STEP
    lookahead = most_heads - 1 if size == spec.masked_product_rows else 0
    count = divide(item.num_tokens * spec.group_size + size - 1, size)
    heads_per_step = next(n for n in (most_heads, 4, 2, 1) if spec.kv_heads % n == 0)
    keys, values, get = refs.head_keys, refs.head_values, operator.getitem

    def attend_heads_of_step(k: Any) -> None:
        def attend_row_chunk(n: jax.Array, carry: jax.Array) -> jax.Array:
            rows = ProductRows(buffer_slot, pl.multiple_of(n * size, size), size, item.first_position)
            mask, columns = (
                make_score_mask(refs, item, rows, key_chunk, 0, spec),
                key_offsets_from_context(refs, item, key_chunk, spec),
            )
            heads = [k * heads_per_step + head for head in range(heads_per_step)]
            bias = 0 if key_chunk.has_pair_bias else None
            positions = pair_functions.key_positions(key_chunk, spec)
            update_softmax(
                refs,
                [
                    HeadChunk(
                        x,
                        rows,
                        partial(get, keys, x),
                        partial(get, values, x),
                        mask,
                        key_offsets=columns,
                        bias_index=bias,
                        key_chunk=key_chunk,
                        key_positions=positions,
                    )
                    for x in heads
                ],
                lookahead,
                spec,
            )
            return carry

        fori_loop(jnp.int32(0), count, attend_row_chunk, jnp.int32(0))

    for_each_index(spec.kv_heads // heads_per_step, attend_heads_of_step)
