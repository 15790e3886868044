"""Loads the rows of a KV head from the words that were copied to VMEM.

With 16 bits and several KV heads, a word has the same channel of two heads of a token, of which one is extracted. The
words of a single head have two consecutive tokens, which is what a register of 16 bits has.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel_pallas.tpu.selected_attention_decode.spec import SelectedDecodeSpec


def load_rows(buffer: Any, spec: SelectedDecodeSpec, first_key: int, count: int, head: Any) -> jax.Array:
    """Returns keys or values [count, D] of a KV head.

    Args:
        buffer: [copies, tokens, word rows, elements per word, D] of a list in VMEM.
        spec: The kernel's constants.
        first_key: Index of the first key in the buffer.
        count: The number of keys.
        head: The KV head: its index if all heads are copied, which is known at compile time.
    """
    words_per_token = spec.word_rows_per_copy
    word_row = head // spec.heads_per_word if spec.heads_per_list > 1 else 0
    first, size = first_key // spec.tokens_per_word, count // spec.tokens_per_word
    words = load_words(buffer, spec, first * words_per_token + word_row, size, words_per_token)
    if spec.elements_per_word == 1:
        return words
    if spec.has_single_head:
        return pltpu.bitcast(words, jnp.dtype(spec.dtype))
    return _extract(words, spec, head % spec.heads_per_word)


def load_words(buffer: Any, spec: SelectedDecodeSpec, first: int, count: int, stride: int) -> jax.Array:
    """Returns `count` rows of words [count, D] of a buffer, `stride` rows apart."""
    words = buffer if spec.elements_per_word == 1 else buffer.bitcast(jnp.uint32)
    rows = words.reshape(-1, words.shape[-1])
    return rows[pl.ds(first, count), :] if stride == 1 else rows[pl.ds(first, count, stride=stride), :]


def _extract(words: jax.Array, spec: SelectedDecodeSpec, element: Any) -> jax.Array:
    """Returns one of the elements of each word."""
    bits = 32 // spec.elements_per_word
    shift = jnp.uint32(element * bits) if isinstance(element, int) else (element * bits).astype(jnp.uint32)
    return pltpu.bitcast((words >> shift).astype(f"uint{bits}"), jnp.dtype(spec.dtype))


def zero_tokens(buffer: Any, spec: SelectedDecodeSpec, is_valid: Callable[[jax.Array], jax.Array]) -> None:
    """Zeroes tokens of a copy in VMEM.

    Args:
        buffer: [tokens, word rows, elements per word, D].
        spec: The kernel's constants.
        is_valid: Returns for indices of tokens in the copy which are kept.
    """
    x = buffer[...]
    token = lax.broadcasted_iota(jnp.int32, x.shape, 0)
    if spec.tokens_per_word > 1:
        token = token * spec.tokens_per_word + lax.broadcasted_iota(jnp.int32, x.shape, 2)
    # The select is done in float32: some chips have none for narrower types.
    buffer[...] = jnp.where(is_valid(token), x.astype(jnp.float32), 0.0).astype(x.dtype)
