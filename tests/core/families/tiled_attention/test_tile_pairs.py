"""Which tiles have work and which are full, against a loop over all pairs of queries and keys."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.families.tiled_attention import TiledAttention
from ejkernel.families.tiled_attention.tile_pairs import TileCut, classify_tile_pairs, padding_as_segments

QUERIES, KEYS, BLOCK = 10, 13, 4
SIDES = (None, 0, 1, 3, 4, 6)
Q_IDS = np.asarray([[0, 0, 0, 0, 1, 1, 1, 2, 2, -1], [3, 3, 3, 3, -1, -1, -1, -1, -1, -1]], np.int32)
K_IDS = np.asarray([[0] * 6 + [1] * 3 + [2] * 2 + [-1] * 2, [3] * 5 + [-1] * 8], np.int32)


def record(**fields):
    query, key = (jax.ShapeDtypeStruct((2, n, 1, 8), jnp.float32) for n in (QUERIES, KEYS))
    return TiledAttention(query=query, key=key, value=key, softmax_scale=1.0, **fields)


def by_tiles(allowed, q_cut, kv_cut):
    """Whether some and every pair of each tile is allowed; a tile that ends behind its array is never full."""
    shape = (len(allowed), q_cut.tiles, kv_cut.tiles)
    some, every = np.zeros(shape, bool), np.zeros(shape, bool)
    for b, i, j in np.ndindex(shape):
        pairs = allowed[b, q_cut.low[i] :, kv_cut.low[j] :][:BLOCK, :BLOCK]
        some[b, i, j], every[b, i, j] = pairs.any(), pairs.all() and pairs.shape == (BLOCK, BLOCK)
    return some, every


def in_band(left, right):
    distance = np.arange(KEYS) - np.arange(QUERIES)[:, None]
    allowed = np.ones((1, QUERIES, KEYS), bool)
    allowed &= left is None or distance >= -left
    return allowed & (right is None or distance <= right)


@pytest.mark.parametrize("moved_back", [False, True])
def test_tile_classes_of_an_index_window_are_exact(moved_back):
    q_cut, kv_cut = TileCut(QUERIES, BLOCK, moved_back), TileCut(KEYS, BLOCK, moved_back)
    for left, right in itertools.product(SIDES, SIDES):
        some, every, _ = classify_tile_pairs(record(sliding_window=(left, right)), q_cut, kv_cut)
        expected_some, expected_every = by_tiles(in_band(left, right), q_cut, kv_cut)
        np.testing.assert_array_equal(some, expected_some, str((left, right)))
        np.testing.assert_array_equal(every, expected_every, str((left, right)))


def test_segments_classify_no_attended_tile_as_empty_and_full_tiles_exactly():
    """Tiles of padding alone have equal ids, and no pair."""
    q_cut, kv_cut = TileCut(QUERIES, BLOCK), TileCut(KEYS, BLOCK)
    call = record(q_segment_ids=jnp.asarray(Q_IDS), kv_segment_ids=jnp.asarray(K_IDS))
    some, every, _ = classify_tile_pairs(call, q_cut, kv_cut)
    allowed = (Q_IDS[:, :, None] == K_IDS[:, None]) & (Q_IDS >= 0)[:, :, None]
    expected_some, expected_every = by_tiles(allowed, q_cut, kv_cut)
    np.testing.assert_array_equal(np.asarray(some) | expected_some, some)
    np.testing.assert_array_equal(every, expected_every)
    assert expected_every.any()
    assert not np.asarray(some)[1, 1:, 2:].any()


@pytest.mark.parametrize("of_queries", [True, False])
@pytest.mark.parametrize("with_ids", [True, False])
def test_padding_masks_become_negative_segment_ids(of_queries, with_ids):
    ids = {"q_segment_ids": jnp.asarray(Q_IDS), "kv_segment_ids": jnp.asarray(K_IDS)} if with_ids else {}
    length = QUERIES if of_queries else KEYS
    mask = np.arange(2 * length).reshape(2, length) % 3 > 0
    shape = (2, 1, length, 1) if of_queries else (2, 1, 1, length)
    made = padding_as_segments(record(mask=jnp.asarray(mask.reshape(shape)), **ids))
    queries, keys = (Q_IDS, K_IDS) if with_ids else (np.zeros((2, QUERIES)), np.zeros((2, KEYS)))
    assert made.mask is None
    np.testing.assert_array_equal(made.q_segment_ids, np.where(mask, queries, -1) if of_queries else queries)
    np.testing.assert_array_equal(made.kv_segment_ids, keys if of_queries else np.where(mask, keys, -1))
