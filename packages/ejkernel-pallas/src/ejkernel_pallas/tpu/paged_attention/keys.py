"""Keys and values of a head, from the pages that were copied.

Rows of a head lie as far apart as a token has rows, and numbers of less than 32 bits share their words with those of
other rows. So words are read with a stride, and what else is in them is cut off: rows of the head, in their order.
Where several heads are joined, `order` says which row is whose.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel_pallas.tpu.mosaic.division import divide
from ejkernel_pallas.tpu.paged_attention.spec import TILE, Spec

SLICE = 128
"""Words of joined heads, in all lanes, that are loaded before any of them is taken apart."""


class Chunk(NamedTuple):
    """Keys of one product.

    Attributes:
        slot: The buffer that they are in.
        start: The first, in the buffer.
        key: Its position in the sequence.
        low: First position that any row attends.
        high: One more than the last.
        masked: Whether some key may not be attended by all.
        size: How many.
    """

    slot: Any
    start: Any
    key: Any
    low: Any
    high: Any
    masked: bool
    size: int


def order(index: jax.Array, size: int, spec: Spec) -> tuple[jax.Array, jax.Array | None]:
    """Which key of a chunk, and which of the joined heads, is at an index of what `load` gives; None for one head."""
    cache = spec.cache
    if spec.joined == 1:
        return index, None
    if not cache.alternates:
        return divide(index, spec.joined), index % spec.joined
    words = cache.words // cache.turns
    total = size * words
    word, which = index % total, divide(index, total)
    return divide(word, words), word % words * cache.heads_per_unit + which


def turns(spec: Spec) -> int:
    """How many groups of heads there are, with a loop from one to the next."""
    heads = spec.kv_heads
    if spec.cache.head_major:
        return heads // TILE if heads % TILE == 0 else 1
    return spec.cache.turns


def load(
    buffers: tuple[Any, ...],
    turn: Any,
    at: Chunk,
    spec: Spec,
    *,
    values: bool,
    between: Callable[[], None] = lambda: None,
) -> list[jax.Array]:
    """Keys [n, D], or values [n, Dv], of the KV heads of a turn, or of all of them joined.

    Args:
        buffers: Of keys and values, or of both.
        turn: Which group of heads; may be traced.
        at: The chunk.
        spec: The kernel's constants.
        values: Which of the two. They are wanted at different times, and would fill the registers in between.
        between: Called after every slice of words of joined heads.

    Returns:
        Of every head, or group of joined heads.
    """
    buffer, cache = buffers[-1 if values else 0], spec.cache
    if spec.joined > 1:
        rows = _all_rows(buffer, turn, at, spec, values, between)
        found = [rows[0] if len(rows) == 1 else jnp.concatenate(rows, axis=0)]
    else:
        heads = spec.kv_heads // turns(spec)
        units = range(heads // cache.heads_per_unit)
        if cache.head_major:
            found = [buffer[at.slot, turn * heads + n, pl.ds(at.start, at.size), :] for n in units]
        else:
            found = [row for unit in units for row in _rows(buffer, turn, unit, at, spec, values)]
    size, dtype = (spec.value_size, spec.weights) if values else (spec.size, spec.operand)
    return [_widened(_rounded(x[:, :size], spec), dtype) for x in found]


def _all_rows(
    buffer: Any, turn: Any, at: Chunk, spec: Spec, values: bool, between: Callable[[], None]
) -> list[jax.Array]:
    """Rows of all words of a turn: those that share words apart, where keys and values do; else as they are.

    Each slice of words is taken apart before the next is loaded. The compiler keeps to this order more or less, and has
    no registers for all words of a chunk.
    """
    cache = spec.cache
    places = range(values, cache.packing, 2) if cache.alternates else range(1)
    total = at.size * (cache.words // cache.turns)
    size = min(total, SLICE)
    made = list[list[jax.Array]]()
    for group in range(cache.groups):
        flat = _as_words(buffer.at[at.slot, group], spec)
        found = list[list[jax.Array]]()
        for start in range(0, total, size):
            x = _span(flat, turn, at, start, size, spec)
            if cache.alternates:
                found.append([_apart(x, which, buffer.dtype, spec) for which in places])
            else:
                found.append([x if cache.packing == 1 else pltpu.bitcast(x, buffer.dtype)])
            between()
        made.append([jnp.concatenate(x, axis=0) for x in zip(*found, strict=True)])
    return _across(made)


def _span(flat: Any, turn: Any, at: Chunk, first: int, count: int, spec: Spec) -> jax.Array:
    """So many words [count, lanes] of a turn, from one of the chunk's on."""
    words, turns = spec.cache.words, spec.cache.turns
    if turns == 1:
        start = pl.multiple_of(at.start * words, at.size * words) + first
        return flat.reshape(-1, flat.shape[-1])[pl.ds(start, count), :]
    tiles = flat.reshape(-1, TILE, flat.shape[-1])
    x = tiles[pl.ds((at.start + first // TILE) * turns + turn, count // TILE, stride=turns)]
    return x.reshape(count, flat.shape[-1])


def _rows(buffer: Any, turn: Any, unit: int, at: Chunk, spec: Spec, values: bool) -> list[jax.Array]:
    """Rows of the heads of a unit: keys of one chunk each."""
    cache, word = spec.cache, unit
    places = range(cache.packing)
    if cache.alternates:
        places = range(0, 1) if cache.packing == 1 else range(values, cache.packing, 2)
        word = 2 * unit + values if cache.packing == 1 else unit
    parts = [_words(buffer.at[at.slot, group], turn, word, at, spec) for group in range(cache.groups)]
    return _across([[_apart(x, which, buffer.dtype, spec) for which in places] for x in parts])


def _across(groups: list[list[jax.Array]]) -> list[jax.Array]:
    """Rows, of groups of lanes of each."""
    return [x[0] if len(x) == 1 else jnp.concatenate(x, axis=1) for x in zip(*groups, strict=True)]


def _as_words(buffer: Any, spec: Spec) -> Any:
    return buffer if spec.cache.packing == 1 else buffer.bitcast(jnp.uint32)


def _words(buffer: Any, turn: Any, word: int, at: Chunk, spec: Spec) -> jax.Array:
    """Words [n, lanes] of keys in their order. A load with a stride begins at a row that the compiler knows."""
    words, chunk = spec.cache.words, at.size
    flat = _as_words(buffer, spec)
    flat = flat.reshape(spec.block * words, flat.shape[-1])
    together = words // spec.cache.turns
    start = at.start * words
    if together < words:
        start = pl.multiple_of(start + turn * together, together)
    part = flat.at[pl.ds(start, (chunk - 1) * words + together)]
    return part[pl.ds(word, chunk, stride=words), :] if words > 1 else part[...]


def _apart(words: jax.Array, which: int, dtype: Any, spec: Spec) -> jax.Array:
    """Rows [n, lanes] of the numbers at one place of words [n, lanes]: an operation cuts two registers of words off."""
    if spec.cache.packing == 1:
        return words
    bits = 32 // spec.cache.packing
    words = words >> jnp.uint32(which * bits) if which else words
    return pltpu.bitcast(words.astype(f"uint{bits}"), dtype)


def _widened(x: jax.Array, dtype: Any) -> jax.Array:
    """Numbers of 8 bits take the way over float32, which every chip has."""
    return x.astype(jnp.float32).astype(dtype) if x.dtype.itemsize == 1 else x.astype(dtype)


def _rounded(x: jax.Array, spec: Spec) -> jax.Array:
    """float32 with the digits of bfloat16; ties go to even digits. In bits, so that no compiler leaves it out."""
    if not spec.rounded:
        return x
    bits = lax.bitcast_convert_type(x, jnp.int32)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & jnp.int32(-65536)
    return lax.bitcast_convert_type(bits, jnp.float32)
