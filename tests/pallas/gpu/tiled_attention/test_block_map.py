"""Which tiles a Mosaic GPU kernel visits, against every pair looked at one by one; and who owns them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attended_pairs import attended
from hypothesis import given, settings
from hypothesis import strategies as st

from ejkernel.families.tiled_attention import TiledAttention
from ejkernel_pallas.gpu.hopper import tile_scheduler
from ejkernel_pallas.gpu.tiled_attention.plan.block_map import (
    key_block_ranges,
    pad_segment_ids,
    query_block_ranges,
    zero_padded_tokens,
)
from ejkernel_pallas.gpu.tiled_attention.spec import make_spec


@st.composite
def calls(draw):
    queries, keys = draw(st.integers(1, 24)), draw(st.integers(1, 24))
    sides = st.none() | st.integers(0, 12)
    features = {"causal": draw(st.booleans()), "sliding_window": draw(st.none() | st.tuples(sides, sides))}
    if draw(st.booleans()):
        rng = np.random.default_rng(draw(st.integers(0, 99)))
        for name, n in (("q_segment_ids", queries), ("kv_segment_ids", keys)):
            features[name] = jnp.asarray(np.sort(rng.integers(-1, 3, (2, n)), axis=1), jnp.int32)
    shapes = ((2, queries, 4, 64), (2, keys, 2, 64), (2, keys, 2, 64))
    q, k, v = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
    return TiledAttention(query=q, key=k, value=v, softmax_scale=0.25, **features)


def masking(pairs, rows, columns, fill):
    """Pairs in tiles, [2, tiles of rows, tiles of columns, pairs of a tile]."""
    padding = ((0, 0), (0, -pairs.shape[1] % rows), (0, -pairs.shape[2] % columns))
    pairs = np.pad(pairs, padding, constant_values=fill)
    b, t, s = pairs.shape
    return (
        pairs.reshape(b, t // rows, rows, s // columns, columns).swapaxes(2, 3).reshape(b, t // rows, s // columns, -1)
    )


@settings(max_examples=30, deadline=None)
@given(calls(), st.sampled_from([(4, 8), (8, 4), (16, 16)]))
def test_ranges_contain_every_attending_pair_and_full_blocks_are_full(call, blocks):
    spec, ids = make_spec(call), None
    if call.q_segment_ids is not None:
        ids = (pad_segment_ids(call.q_segment_ids, blocks[0], -1), pad_segment_ids(call.kv_segment_ids, blocks[1], -2))
    pairs = attended(call)
    # Queries beyond the end may see anything: nothing is written for them. Keys beyond the end are seen by nobody.
    beyond = np.pad(pairs, ((0, 0), (0, -pairs.shape[1] % blocks[0]), (0, 0)), constant_values=True)
    some, every = masking(pairs, *blocks, False).any(-1), masking(beyond, *blocks, False).all(-1)
    for visits, some_, every_ in (
        (key_block_ranges(spec, ids, *blocks), some, every),
        (query_block_ranges(spec, ids, *blocks), some.swapaxes(1, 2), every.swapaxes(1, 2)),
    ):
        for b, tile in np.ndindex(some_.shape[:2]):
            first, full_start, full_end, last = np.asarray(visits)[b if len(visits) > 1 else 0, tile]
            assert 0 <= first <= full_start <= full_end <= last <= some_.shape[2]
            assert first < last
            index = np.arange(some_.shape[2])
            visited = (index >= first) & (index < last)
            assert visited[some_[b, tile]].all()
            assert every_[b, tile][full_start:full_end].all()
            if ids is None and some_[b, tile].any():
                assert visited.sum() == np.ptp(index[some_[b, tile]]) + 1
                assert every_[b, tile].sum() == full_end - full_start or not every_[b, tile].any()


def test_padding_ids_of_queries_and_keys_are_never_equal():
    queries, keys = pad_segment_ids(jnp.array([[0, -5, 1]]), 4, -1), pad_segment_ids(jnp.array([[-5, 0]]), 4, -2)
    assert queries.tolist() == [[0, -1, 1, -1]]
    assert keys.tolist() == [[-2, 0, -2, -2]]


def test_padding_tokens_become_zeros_even_if_they_hold_nan():
    x = jnp.array([jnp.nan, 2.0, jnp.inf], jnp.bfloat16)[None, :, None, None]
    made = zero_padded_tokens(x, jnp.array([[-1, 0, -7]]))
    assert made.dtype == jnp.bfloat16
    assert made.ravel().tolist() == [0.0, 2.0, 0.0]


@pytest.mark.parametrize(
    ("batch", "heads", "group", "length", "causal"),
    [(4, 16, 1, 8192, True), (1, 32, 4, 896, False), (1, 1, 1, 60, True)],
)
def test_the_tile_schedule_has_every_tile_once_and_the_longest_first(batch, heads, group, length, causal, monkeypatch):
    monkeypatch.setattr(tile_scheduler, "num_multiprocessors", lambda: 132)
    q, k = (jax.ShapeDtypeStruct((batch, length, n, 128), jnp.bfloat16) for n in (heads, heads // group))
    visits = key_block_ranges(
        make_spec(TiledAttention(query=q, key=k, value=k, softmax_scale=1.0, causal=causal)), None, 128, 128
    )
    plan = tile_scheduler.make_tile_schedule(
        visits.shape[1],
        batch_size=batch,
        heads_per_batch_row=heads,
        reverses_tiles=causal,
        head_bytes=4 * 2**20,
        heads_per_group=group,
        is_persistent=True,
    )
    assert plan.num_blocks == min(132, plan.num_items)
    items = [tile_scheduler.locate_work_tile(plan, jnp.int32(number)) for number in range(plan.num_items)]
    owned = [(int(item.batch_row), int(item.head), int(item.tile_in_head)) for item in items]
    assert sorted(owned) == [(b, h, t) for b in range(batch) for h in range(heads) for t in range(visits.shape[1])]
    size = plan.heads_per_bundle * plan.tiles_per_head
    for start in range(0, plan.num_items, size):
        tiles = [tile for _, _, tile in owned[start : start + size]]
        assert tiles == sorted(tiles, reverse=causal)
        assert len({(b, h) for b, h, _ in owned[start : start + size]}) == plan.heads_per_bundle


def test_padding_after_the_last_query_adds_no_key_blocks():
    """Of 16 queries, in tiles of 12: those after them see nothing, and not all that the first segments see."""
    ids = jnp.repeat(jnp.arange(4, dtype=jnp.int32), 4)[None]
    q = jax.ShapeDtypeStruct((1, 16, 1, 64), jnp.bfloat16)
    spec = make_spec(TiledAttention(query=q, key=q, value=q, softmax_scale=1.0, q_segment_ids=ids, kv_segment_ids=ids))
    made = key_block_ranges(spec, (pad_segment_ids(ids, 12, -1), pad_segment_ids(ids, 4, -2)), 12, 4)
    assert made[0].tolist() == [[0, 0, 0, 3], [3, 3, 3, 4]]
