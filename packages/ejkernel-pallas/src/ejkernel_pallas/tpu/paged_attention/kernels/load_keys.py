"""Loads a head's keys and values from the pages that were copied to VMEM.

    buffer in VMEM, 16 bits, 2 KV heads: one 32-bit word row holds two rows          what a product reads

    token 0   word row: [ K head 0 | V head 0 ]  x 128 lanes  ┐ strided load of      ┌ K head 0, token 0
              word row: [ K head 1 | V head 1 ]               │ word rows of a head  │ K head 0, token 1
    token 1   word row: [ K head 0 | V head 0 ]               ┘ ─► extract 16 bits ─►└ ...

The rows of one head are as far apart as a token has rows, and elements of less than 32 bits share words with other
rows. So the kernel loads words with a stride, and extracts the head's elements. Where heads share products
(`heads_per_product`), nothing is extracted per head: `key_and_head_of_index` gives the head of each loaded row.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.arithmetic import cdiv
from ejkernel_pallas.tpu.mosaic.division import divide
from ejkernel_pallas.tpu.mosaic.paged_layout import MEMORY_TILE_ROWS
from ejkernel_pallas.tpu.mosaic.vectors import LANES
from ejkernel_pallas.tpu.paged_attention.spec import PagedSpec

WORD_ROWS_PER_LOAD = 128
"""The number of word rows that are loaded before the first of them is unpacked, where heads share a product: as many as
registers hold.
"""


class KeyChunk(NamedTuple):
    """The keys of one product.

    Attributes:
        buffer_slot: The slot of the buffers in VMEM that has the keys.
        start_in_buffer: Index of the first key in that slot.
        first_key: Position of the first key in the sequence.
        attended_start: The first position that any row attends.
        attended_end: One more than the last position that any row attends.
        needs_mask: Whether some row may not attend some key.
        num_keys: The number of keys.
        has_pair_bias: Whether some of the keys are new tokens that have a bias.
    """

    buffer_slot: Any
    start_in_buffer: Any
    first_key: Any
    attended_start: Any
    attended_end: Any
    needs_mask: bool
    num_keys: int
    has_pair_bias: bool = False


def key_and_head_of_index(index: jax.Array, size: int, spec: PagedSpec) -> tuple[jax.Array, jax.Array | None]:
    """Returns the key and the head of each index of what `load` returns; the head is None if a product has a single
    head.
    """
    cache = spec.cache_layout
    if spec.heads_per_product == 1:
        return index, None
    if not cache.interleaves_keys_and_values:
        return divide(index, spec.heads_per_product), index % spec.heads_per_product
    words = cache.word_rows_per_token // cache.num_head_groups
    total = size * words
    word, which = index % total, divide(index, total)
    return divide(word, words), word % words * cache.kv_heads_per_word_row + which


def num_head_groups(spec: PagedSpec) -> int:
    """Returns the number of head groups that the kernel loops over."""
    heads = spec.kv_heads
    if spec.cache_layout.codes is not None:
        return heads
    if spec.cache_layout.is_head_major:
        return heads // MEMORY_TILE_ROWS if heads % MEMORY_TILE_ROWS == 0 else 1
    return spec.cache_layout.num_head_groups


def load_head_group(
    buffers: tuple[Any, ...],
    head_group_index: Any,
    at: KeyChunk,
    spec: PagedSpec,
    *,
    values: bool,
    after_each_slice: Callable[[], None] = lambda: None,
) -> list[jax.Array]:
    """Loads keys [n, D] or values [n, Dv] of the KV heads of a head group.

    Keys and values of a transposed cache are [D, n] and [Dv, n].

    Args:
        buffers: The buffers of keys and of values, or one buffer of both.
        head_group_index: Index of the group of heads; may be traced.
        at: The chunk of keys.
        spec: The kernel's constants.
        values: Whether to load values instead of keys. The two are used at different times, and would occupy registers
            in between if loaded together.
        after_each_slice: Called after every slice of words of heads that share a product.

    Returns:
        One array per head, or per group of heads that share a product.
    """
    cache = spec.cache_layout
    buffer = buffers[-1 if values and not cache.rotary_dim else 0]
    if cache.tokens_along_lanes:
        size, dtype = (spec.value_dim, spec.weights_dtype) if values else (spec.head_dim, spec.operand_dtype)
        columns = buffer[at.buffer_slot, 0, :size, pl.ds(pl.multiple_of(at.start_in_buffer, LANES), at.num_keys)]
        return [_convert_key_dtype(_round_to_bfloat16(columns, spec), dtype)]
    if spec.heads_per_product > 1:
        rows = _load_rows_of_all_words(buffer, head_group_index, at, spec, values, after_each_slice)
        rows_of_heads = [rows[0] if len(rows) == 1 else jnp.concatenate(rows, axis=0)]
    else:
        heads = spec.kv_heads // num_head_groups(spec)
        units = range(heads // cache.kv_heads_per_word_row)
        if cache.is_latent and not cache.is_head_major:
            rows_of_heads = [_load_latent_rows(buffer, at, spec, spec.value_dim if values else spec.head_dim)]
        elif cache.is_head_major:
            rows_of_heads = [
                buffer[at.buffer_slot, head_group_index * heads + n, pl.ds(at.start_in_buffer, at.num_keys), :]
                for n in units
            ]
        else:
            rows_of_heads = [
                row
                for unit in units
                for row in _load_heads_of_word_row(buffer, head_group_index, unit, at, spec, values)
            ]
    size, dtype = (spec.value_dim, spec.weights_dtype) if values else (spec.head_dim, spec.operand_dtype)
    return [_convert_key_dtype(_round_to_bfloat16(x[:, :size], spec), dtype) for x in rows_of_heads]


def load_rotary(buffers: tuple[Any, ...], at: KeyChunk, spec: PagedSpec) -> jax.Array:
    """Loads the rotary part [Dr, n] of keys, from a second cache."""
    columns = buffers[1][at.buffer_slot, 0, :, pl.ds(pl.multiple_of(at.start_in_buffer, LANES), at.num_keys)]
    return _convert_key_dtype(_round_to_bfloat16(columns, spec), spec.operand_dtype)


def _load_latent_rows(buffer: Any, at: KeyChunk, spec: PagedSpec, size: int) -> jax.Array:
    """Returns the first `size` elements of latent rows. A lane's word contains consecutive tokens, so nothing is
    extracted.
    """
    pack, pieces = spec.cache_layout.elements_per_word, list[jax.Array]()
    for group in range(cdiv(size, LANES)):
        flat = _view_as_words(buffer.at[at.buffer_slot, group], spec)
        words = flat.reshape(-1, LANES)[
            pl.ds(pl.multiple_of(divide(at.start_in_buffer, pack), MEMORY_TILE_ROWS), at.num_keys // pack), :
        ]
        pieces.append(words if pack == 1 else pltpu.bitcast(words, buffer.dtype))
    return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=1)


def _load_rows_of_all_words(
    buffer: Any, head_group: Any, at: KeyChunk, spec: PagedSpec, values: bool, after_each_slice: Callable[[], None]
) -> list[jax.Array]:
    """Returns the rows of all words of a head group: keys or values extracted if the two share words, else as they
    are stored.

    Each slice of words is unpacked before the next is loaded. The compiler's scheduler mostly keeps this order;
    otherwise the words of a whole chunk would be live at once and spill.
    """
    cache = spec.cache_layout
    subwords = range(values, cache.elements_per_word, 2) if cache.interleaves_keys_and_values else range(1)
    total = at.num_keys * (cache.word_rows_per_token // cache.num_head_groups)
    size = min(total, WORD_ROWS_PER_LOAD)
    groups = list[list[jax.Array]]()
    for group in range(cache.num_lane_groups):
        flat = _view_as_words(buffer.at[at.buffer_slot, group], spec)
        slices = list[list[jax.Array]]()
        for start in range(0, total, size):
            x = _load_contiguous_words(flat, head_group, at, start, size, spec)
            if cache.interleaves_keys_and_values:
                slices.append([_extract_subword(x, which, buffer.dtype, spec) for which in subwords])
            else:
                slices.append([x if cache.elements_per_word == 1 else pltpu.bitcast(x, buffer.dtype)])
            after_each_slice()
        groups.append([jnp.concatenate(x, axis=0) for x in zip(*slices, strict=True)])
    return _concatenate_lane_groups(groups)


def _load_contiguous_words(
    word_rows: Any, head_group: Any, at: KeyChunk, first: int, count: int, spec: PagedSpec
) -> jax.Array:
    """Loads `count` words [count, lanes] of a head group, beginning with the chunk's word `first`."""
    words, num_head_groups = spec.cache_layout.word_rows_per_token, spec.cache_layout.num_head_groups
    if num_head_groups == 1:
        start = pl.multiple_of(at.start_in_buffer * words, at.num_keys * words) + first
        return word_rows.reshape(-1, word_rows.shape[-1])[pl.ds(start, count), :]
    tiles = word_rows.reshape(-1, MEMORY_TILE_ROWS, word_rows.shape[-1])
    x = tiles[
        pl.ds(
            (at.start_in_buffer + first // MEMORY_TILE_ROWS) * num_head_groups + head_group,
            count // MEMORY_TILE_ROWS,
            stride=num_head_groups,
        )
    ]
    return x.reshape(count, word_rows.shape[-1])


def _load_heads_of_word_row(
    buffer: Any, head_group: Any, word_row_index: int, at: KeyChunk, spec: PagedSpec, values: bool
) -> list[jax.Array]:
    """Returns the keys (or values) of one chunk for each head that is packed into a row of words."""
    cache, word = spec.cache_layout, word_row_index
    subwords = range(cache.elements_per_word)
    if cache.interleaves_keys_and_values:
        subwords = range(0, 1) if cache.elements_per_word == 1 else range(values, cache.elements_per_word, 2)
        word = 2 * word_row_index + values if cache.elements_per_word == 1 else word_row_index
    words_of_groups = [
        _load_words(buffer.at[at.buffer_slot, group], head_group, word, at, spec)
        for group in range(cache.num_lane_groups)
    ]
    return _concatenate_lane_groups(
        [[_extract_subword(x, which, buffer.dtype, spec) for which in subwords] for x in words_of_groups]
    )


def _concatenate_lane_groups(rows_by_lane_group: list[list[jax.Array]]) -> list[jax.Array]:
    """Returns rows, concatenated from their groups of 128 lanes."""
    return [x[0] if len(x) == 1 else jnp.concatenate(x, axis=1) for x in zip(*rows_by_lane_group, strict=True)]


def _view_as_words(buffer: Any, spec: PagedSpec) -> Any:
    return buffer if spec.cache_layout.elements_per_word == 1 else buffer.bitcast(jnp.uint32)


def _load_words(buffer: Any, head_group: Any, word_row_index: int, at: KeyChunk, spec: PagedSpec) -> jax.Array:
    """Returns the words [n, lanes] of consecutive keys. A strided load must start at a row that is known at compile
    time.
    """
    words, chunk = spec.cache_layout.word_rows_per_token, at.num_keys
    flat = _view_as_words(buffer, spec)
    flat = flat.reshape(spec.block_kv * words, flat.shape[-1])
    words_per_group = words // spec.cache_layout.num_head_groups
    start = at.start_in_buffer * words
    if words_per_group < words:
        start = pl.multiple_of(start + head_group * words_per_group, words_per_group)
    span = flat.at[pl.ds(start, (chunk - 1) * words + words_per_group)]
    return span[pl.ds(word_row_index, chunk, stride=words), :] if words > 1 else span[...]


def _extract_subword(words: jax.Array, subword_index: int, dtype: Any, spec: PagedSpec) -> jax.Array:
    """Returns rows [n, lanes] of the elements at index `subword_index` of words [n, lanes], by a shift and a pack of
    two registers.
    """
    if spec.cache_layout.elements_per_word == 1:
        return words
    bits = 32 // spec.cache_layout.elements_per_word
    words = words >> jnp.uint32(subword_index * bits) if subword_index else words
    return pltpu.bitcast(words.astype(f"uint{bits}"), dtype)


def _convert_key_dtype(x: jax.Array, dtype: Any) -> jax.Array:
    """Converts to `dtype`; 8-bit elements are converted via float32, which every chip supports."""
    return x.astype(jnp.float32).astype(dtype) if x.dtype.itemsize == 1 else x.astype(dtype)


def _round_to_bfloat16(x: jax.Array, spec: PagedSpec) -> jax.Array:
    """Rounds float32 to bfloat16's precision, ties to even, in integer arithmetic so that no compiler removes the
    conversion.
    """
    if not spec.rounds_to_bfloat16:
        return x
    bits = lax.bitcast_convert_type(x, jnp.int32)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & jnp.int32(-65536)
    return lax.bitcast_convert_type(bits, jnp.float32)
