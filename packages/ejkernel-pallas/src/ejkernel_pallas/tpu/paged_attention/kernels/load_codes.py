"""Unpacks keys and values of a TurboQuant cache from the pages that were copied to VMEM.

    VMEM  keys_buffer        codes [Hk, bytes, keys]: tokens along lanes, as XLA stores pages of 128 slots
          │   shift, and, look-up in the codebook: a permutation of one register's sublanes
          ▼
          [D, keys]          codebook entries, without their norms: an operand of the MXU as they are
    VMEM  key_signs_buffer   one bit per projection
          │   shift, and, exclusive or: the sign bit of 1.0, two rows per 32-bit word for 16-bit operands
          ▼
          [Q, keys]          1 or -1

Norms are factors on columns of products: scores are |k| (R q) C + |r| (P R q) S, and weights are multiplied by the
values' norms before their product. So norms cost an operation per score instead of one per coordinate.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel_pallas.tpu.mosaic.code_rows import CodeRows
from ejkernel_pallas.tpu.mosaic.vectors import LANES, SUBLANES, lane_groups
from ejkernel_pallas.tpu.paged_attention.kernels.load_keys import KeyChunk
from ejkernel_pallas.tpu.paged_attention.kernels.refs import PagedRefs
from ejkernel_pallas.tpu.paged_attention.spec import PagedSpec

MAX_CODE_BITS = 4
WORDS_PER_8_GROUPS = 6
"""Words of 8 groups of 3 bytes, each of which is eight codes of 3 bits."""
HALF_SIGN_BITS, HALF_MINUS_ONES = 0x80008000, 0xBF80BF80
"""The sign bits of two bfloat16 numbers in a word, and -1 twice."""
SIGN_BIT, MINUS_ONE = 0x80000000, 0xBF800000
"""The same of float32."""


class CodeChunk(NamedTuple):
    """What a product with codes reads besides keys and values.

    Attributes:
        load_signs: Loads the signs of the keys' residuals, [Q, n]; None without them.
        load_key_norms: Loads the norms [1, n] of the keys, and of their residuals.
        load_value_norms: Loads the norms [1, n] of the values.
    """

    load_signs: Callable[[], jax.Array] | None
    load_key_norms: Callable[[], tuple[jax.Array, jax.Array]]
    load_value_norms: Callable[[], jax.Array]


def load_codes(refs: PagedRefs, head: Any, at: KeyChunk, spec: PagedSpec, *, values: bool) -> jax.Array:
    """Loads the codebook entries of a head's keys [D, n], or of its values."""
    codes = spec.cache_layout.codes
    assert codes is not None  # the cache has codes
    if values:
        return _entries(_words(refs.values_buffer, head, at), refs.value_table, codes.values, spec.weights_dtype)
    return _entries(_words(refs.keys_buffer, head, at), refs.key_table, codes.keys, spec.operand_dtype)


def make_code_chunk(refs: PagedRefs, head: Any, at: KeyChunk, spec: PagedSpec) -> CodeChunk:
    """Returns what else a product of a head's queries with codes reads."""
    codes = spec.cache_layout.codes
    assert codes is not None  # the cache has codes
    rows, dtype = codes.signs, spec.operand_dtype
    return CodeChunk(
        None if rows is None else lambda: _signs(_words(refs.key_signs_buffer, head, at), rows, dtype),
        lambda: _key_norms(refs, head, at),
        lambda: refs.value_norm_rows[pl.ds(head, 1), _lanes(at)],
    )


def store_value_norms(refs: PagedRefs, at: KeyChunk, num_keys: int) -> None:
    """Stores the values' norms of all heads in float32, whose rows can be loaded one by one."""
    lanes = pl.ds(pl.multiple_of(at.start_in_buffer, LANES), num_keys)
    refs.value_norm_rows[:, lanes] = refs.value_norms_buffer[at.buffer_slot, :, lanes].astype(jnp.float32)


def _lanes(at: KeyChunk) -> Any:
    return pl.ds(pl.multiple_of(at.start_in_buffer, LANES), at.num_keys)


def _words(buffer: Any, head: Any, at: KeyChunk) -> jax.Array:
    """Returns words uint32 [words, n] of a head's codes."""
    return pltpu.bitcast(buffer[at.buffer_slot, head, :, _lanes(at)], jnp.uint32)


def _key_norms(refs: PagedRefs, head: Any, at: KeyChunk) -> tuple[jax.Array, jax.Array]:
    norms = refs.key_norms_buffer[at.buffer_slot, head, :, _lanes(at)]
    if norms.dtype == jnp.float32:
        return norms[:1], norms[1:]
    both = pltpu.bitcast(norms, jnp.uint32)  # the key's in the low half, the residual's in the high half
    return _as_float(both << jnp.uint32(16)), _as_float(both & jnp.uint32(0xFFFF0000))


def _as_float(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


def _words_of_24_bits(words: jax.Array) -> jax.Array:
    """Returns bytes 3 g to 3 g + 2 of words [6 m, n] in the low bits of row g of [8 m, n]; the highest byte is any."""
    first_byte = 3 * lax.broadcasted_iota(jnp.int32, (SUBLANES, LANES), 0)
    index, shift = first_byte >> 2, (first_byte & 3) * 8
    # Shifts of 32 bits are undefined: after a shift by 0 or 8, what follows only has to stay out of the low 24 bits.
    shift_of_next = 32 - jnp.maximum(shift, 8)

    def at_bytes(x: jax.Array) -> jax.Array:
        first, following = (jnp.take_along_axis(x, index + n, axis=0, mode="promise_in_bounds") for n in (0, 1))
        return first >> shift.astype(jnp.uint32) | following << shift_of_next.astype(jnp.uint32)

    groups = [words[row : row + WORDS_PER_8_GROUPS] for row in range(0, words.shape[0], WORDS_PER_8_GROUPS)]
    padded = [jnp.concatenate((x, x[: SUBLANES - WORDS_PER_8_GROUPS]), axis=0) for x in groups]
    return jnp.concatenate([_for_each_register(at_bytes, x) for x in padded], axis=0)


def _repeated(words: jax.Array, rows: CodeRows) -> tuple[jax.Array, Any]:
    """Returns the words once per copy, and how many bits each copy is shifted by before the first plane."""
    if rows.crosses_words:
        return _words_of_24_bits(words), jnp.uint32(0)
    if rows.copies == 1:
        return words, jnp.uint32(0)
    words = jnp.concatenate([words] * rows.copies, axis=0)
    copy = lax.broadcasted_iota(jnp.int32, words.shape, 0) >> (rows.words.bit_length() - 1)
    return words, (copy * (rows.bits * rows.num_planes)).astype(jnp.uint32)


def _entries(words: jax.Array, table: Any, rows: CodeRows, dtype: Any) -> jax.Array:
    """Returns the entries of a codebook [count, n] at the codes of words."""
    words, offset = _repeated(words, rows)
    low, high = table[:SUBLANES], table[SUBLANES:]
    planes = [words >> (offset + jnp.uint32(rows.bits * p)) for p in range(rows.num_planes)]

    def look_up(x: jax.Array) -> jax.Array:
        """Returns entries at the lowest bits of [8, 128], by a permutation of sublanes, which is a vector operation."""
        index = (x & jnp.uint32(min(2**rows.bits, SUBLANES) - 1)).astype(jnp.int32)
        entry = jnp.take_along_axis(low, index, axis=0, mode="promise_in_bounds")
        if rows.bits < MAX_CODE_BITS:
            return entry
        upper = jnp.take_along_axis(high, index, axis=0, mode="promise_in_bounds")
        return jnp.where((x & jnp.uint32(SUBLANES)) == 0, entry, upper)

    return jnp.concatenate([_for_each_register(look_up, x) for x in planes], axis=0).astype(dtype)


def _for_each_register(function: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Applies a function of [8, 128] to all registers of [8 m, 128 n]."""
    rows = [x[row : row + SUBLANES] for row in range(0, x.shape[0], SUBLANES)]
    return jnp.concatenate([jnp.concatenate(list(map(function, lane_groups(row))), axis=1) for row in rows], axis=0)


def _signs(words: jax.Array, rows: CodeRows, dtype: Any) -> jax.Array:
    """Returns 1 for bits that are set and -1 for others, [count, n]."""
    words, offset = _repeated(words, rows)
    top, sign, minus_one = (15, HALF_SIGN_BITS, HALF_MINUS_ONES) if rows.packs_halves else (31, SIGN_BIT, MINUS_ONE)
    planes = [
        words << (jnp.uint32(top - p) - offset) & jnp.uint32(sign) ^ jnp.uint32(minus_one)
        for p in range(rows.num_planes)
    ]
    return jnp.concatenate([pltpu.bitcast(x, dtype) for x in planes], axis=0)
