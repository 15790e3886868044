"""Where tokens lie in pages, against loops over sequences and positions."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.families.paged_attention import PagedAttention
from ejkernel.families.paged_attention.pages import (
    find_pages_and_slots,
    query_tiles,
    token_sequences_and_positions,
    write_new_tokens,
)

PAGES, SIZE, TOKENS = 5, 4, 9
TABLES = np.asarray([[2, 0, -1], [3, 7, 1], [4, 4, 4]], np.int32)
LENGTHS = np.asarray([7, 11, 5], np.int32)
STARTS = np.asarray([0, 3, 7, 8], np.int32)  # the last row belongs to no sequence


def record(**fields):
    cache = jnp.zeros((PAGES, SIZE, 1, 2), jnp.float32)
    call = PagedAttention(
        query=jnp.zeros((TOKENS, 1, 2)),
        key_pages=cache,
        value_pages=cache,
        block_tables=jnp.asarray(TABLES),
        kv_lens=jnp.asarray(LENGTHS),
        query_start=jnp.asarray(STARTS),
        softmax_scale=1.0,
        kv_layout="pshd",
        kv_heads=None,
    )
    return dataclasses.replace(call, **fields)


def place(sequence, position, prefix=0):
    """(page, slot); the page PAGES, which there is not, for what is absent."""
    if sequence < 0 or position < 0 or position // SIZE >= TABLES.shape[1]:
        return PAGES, None
    page = TABLES[0 if position < prefix else sequence, position // SIZE]
    return (page, position % SIZE) if 0 <= page < PAGES else (PAGES, None)


@pytest.mark.parametrize("prefix", [None, 4, 5])
def test_absent_tokens_have_no_page_and_shared_pages_are_found(prefix):
    call = record(shared_prefix=None if prefix is None else jnp.int32(prefix))
    sequence, position = np.meshgrid(np.arange(-1, 3), np.arange(-1, 4 * SIZE), indexing="ij")
    pages, slots = jax.jit(find_pages_and_slots)(call, sequence, position)
    for i, j in np.ndindex(sequence.shape):
        page, slot = place(sequence[i, j], position[i, j], prefix or 0)
        assert pages[i, j] == page, (sequence[i, j], position[i, j])
        assert slot is None or slots[i, j] == slot


def test_query_rows_end_where_their_sequence_does():
    sequence, position = jax.jit(token_sequences_and_positions)(record())
    expected = [
        (n, LENGTHS[n] - (STARTS[n + 1] - STARTS[n]) + i) for n in range(3) for i in range(STARTS[n + 1] - STARTS[n])
    ]
    assert list(zip(sequence.tolist(), position.tolist(), strict=True)) == [*expected, (-1, 0)]


def test_only_slots_of_present_tokens_are_written():
    """Those of sequence 1 at positions 7 to 10 lie in a page that there is not, and in page 1."""
    news = jnp.arange(1.0, 1 + TOKENS * 2).reshape(TOKENS, 1, 2)
    sequence, position = token_sequences_and_positions(record())
    expected = np.zeros((PAGES, SIZE, 1, 2), np.float32)
    for token, (n, k) in enumerate(zip(sequence.tolist(), position.tolist(), strict=True)):
        page, slot = place(n, k)
        if page < PAGES and n >= 0:
            expected[page, slot] = news[token]
    _, (keys, values) = jax.jit(write_new_tokens)(record(new_keys=news, new_values=-news))
    np.testing.assert_array_equal(keys, expected)
    np.testing.assert_array_equal(values, -expected)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_query_tiles_have_every_row_once_and_in_order(size):
    tiles = jax.jit(query_tiles, static_argnums=1)(record(), size)
    rows = [
        (n, skipped + i, position + i)
        for n, skipped, count, position in zip(
            *(x.tolist() for x in (tiles.sequence, tiles.row_offset, tiles.rows, tiles.position)), strict=True
        )
        for i in range(count)
    ]
    lengths = np.diff(STARTS)
    assert rows == [(n, i, LENGTHS[n] - lengths[n] + i) for n in range(3) for i in range(lengths[n])]
    assert int(tiles.total) == sum(-(-n // size) for n in lengths)
