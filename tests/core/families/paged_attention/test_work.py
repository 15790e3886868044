"""The work list of paged attention, against loops over rows and keys."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.families.paged_attention import PagedAttention
from ejkernel.families.paged_attention.record import causal_window_bounds
from ejkernel.families.paged_attention.work import WorkList, distribute_key_tiles, make_work_list

SIZE, TOKENS = 4, 12
LENGTHS = np.asarray([7, 16, 9], np.int32)
STARTS = np.asarray([0, 5, 6, 12], np.int32)
FIRST = np.asarray([0, 2, 3], np.int32)


def record(left, right, starts):
    cache = jnp.zeros((3, SIZE, 1, 2), jnp.float32)
    return PagedAttention(
        query=jnp.zeros((TOKENS, 1, 2)),
        key_pages=cache,
        value_pages=cache,
        block_tables=jnp.zeros((3, 4), jnp.int32),
        kv_lens=jnp.asarray(LENGTHS),
        query_start=jnp.asarray(STARTS),
        kv_starts=jnp.asarray(FIRST) if starts else None,
        softmax_scale=1.0,
        kv_layout="pshd",
        kv_heads=None,
        causal=False,
        sliding_window=(left, right),
    )


@pytest.mark.parametrize("starts", [False, True])
@pytest.mark.parametrize(("left", "right"), [(None, 0), (3, 0), (2, 1), (None, None), (0, 2)])
def test_work_entries_span_the_first_to_last_attended_key_of_their_rows(left, right, starts):
    work = jax.tree.map(np.asarray, jax.jit(make_work_list, static_argnums=1)(record(left, right, starts), 2))
    for sequence, rows, position, low, high in zip(*work[1:2], *work[3:5], *work[6:], strict=True):
        seen = [
            k
            for p in range(position, position + rows)
            for k in range(FIRST[sequence] if starts else 0, LENGTHS[sequence])
            if (left is None or k >= p - left) and (right is None or k <= p + right)
        ]
        assert (low, high) == (min(seen), max(seen) + 1) if seen else low == high


@pytest.mark.parametrize("programs", [1, 2, 3, 5, 40])
def test_programs_have_every_key_tile_once(programs):
    low, high, rows = np.asarray([[0, 3, 8, 5, 0], [9, 8, 16, 5, 0], [2, 2, 1, 2, 0]], np.int32)
    nothing = np.zeros_like(low)
    work = WorkList(np.int32(4), nothing, nothing, rows, nothing, nothing, low, high)
    block, heads = 4, 2
    dealt = jax.tree.map(
        np.asarray, jax.jit(distribute_key_tiles, static_argnums=(1, 2, 3))(work, block, heads, programs)
    )
    count = [len({k // block for k in range(low[i], high[i])}) or 1 for i in range(4)]
    assert dealt.tiles_per_head.tolist() == [*count, 0]
    line = [entry for entry in range(4) for _ in range(count[entry] * heads)]
    assert dealt.total == len(line)
    assert dealt.tiles_per_program == max(1, -(-len(line) // programs))
    for begin, entry in zip(dealt.begin, dealt.entry, strict=True):
        if begin < len(line):
            assert entry == line[begin]


@pytest.mark.parametrize(
    ("window", "expected"), [(None, (None, 0)), ((3, 2), (3, 0)), ((2, None), (2, 0)), ((None, -1), (None, -1))]
)
def test_causal_calls_have_no_key_after_a_query(window, expected):
    assert (
        causal_window_bounds(dataclasses.replace(record(None, None, starts=False), causal=True, sliding_window=window))
        == expected
    )
