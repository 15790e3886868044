"""Block maps and block lists: every attending pair is visited once, and no tile says more of its pairs than is true."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ejkernel.families.tiled_attention import TiledAttention
from ejkernel.families.tiled_attention.block_maps import block_lists, block_map, pattern_refusals
from ejkernel.types.sparse_masks import CausalMask, ChunkedCausalMask, LocalMask, Mask, MultiHeadMask, NumpyMask

HEADS = 2
BLOCK = (8, 4)


def record(queries, keys, pattern=None, heads=HEADS, **features):
    query, key = (jax.ShapeDtypeStruct((1, n, heads, 16), jnp.float32) for n in (queries, keys))
    return TiledAttention(query=query, key=key, value=key, softmax_scale=1.0, pattern=pattern, **features)


def pattern_of(kind: str, queries: int, keys: int) -> Mask:
    shape, rng = (queries, keys), np.random.default_rng(queries * keys)
    scattered = NumpyMask(rng.random(shape) < 0.1)
    return {
        "band": LocalMask(shape, (5, 2)),
        "scattered": scattered | LocalMask(shape, (0, 0)),
        "by head": MultiHeadMask((ChunkedCausalMask(shape, 6), scattered & CausalMask(shape))),
    }[kind]


def attended(call) -> tuple[np.ndarray, np.ndarray]:
    """Which pairs attend, bool [H, T, S], and which do but for the pattern."""
    shape = (call.query.shape[1], call.key.shape[1])
    ids = np.arange(shape[0])[:, None], np.arange(shape[1])
    near = np.broadcast_to((ids[1] <= ids[0]) if call.causal else np.ones(shape, bool), (HEADS, *shape))
    if call.pattern is None:
        return near, near
    parts = [np.asarray(call.pattern.of_head(h).allowed(0, 0, shape)) for h in range(HEADS)]
    return near & np.stack(parts), near


def visited(lists, tile_masks, near, block, heads=HEADS):
    """What a kernel makes of the lists, bool [heads, T, S]: full blocks whole, partial ones by tile mask and `near`."""
    found = np.zeros_like(near)
    full, count, blocks, ids = (
        None if x is None else np.broadcast_to(np.asarray(x), (1, heads, *x.shape[2:]))[0]
        for x in (lists.full, lists.count, lists.blocks, lists.mask_ids)
    )
    for head, tile in np.ndindex(full.shape):
        assert len(set(blocks[head, tile, : count[head, tile]])) == count[head, tile]
        for n in range(count[head, tile]):
            rows = slice(tile * block[0], (tile + 1) * block[0])
            columns = slice(blocks[head, tile, n] * block[1], (blocks[head, tile, n] + 1) * block[1])
            shown = near[head, rows, columns]
            if n < full[head, tile]:
                assert shown.shape == block
                shown = np.ones(block, bool)
            elif ids is not None:
                shown = shown & (tile_masks[ids[head, tile, n]] != 0)[: shown.shape[0], : shown.shape[1]]
            found[head, rows, columns] = shown
    return found


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 30), st.integers(1, 30), st.sampled_from(["band", "scattered", "by head", None]), st.booleans())
def test_block_maps_list_every_pair_once_by_queries_and_by_keys(queries, keys, kind, causal):
    call = record(queries, keys, None if kind is None else pattern_of(kind, queries, keys), causal=causal)
    found, (pairs, near) = block_map(call, *BLOCK), attended(call)
    assert (visited(block_lists(found), found.tile_masks, near, BLOCK) == pairs).all()
    flipped = None if found.tile_masks is None else found.tile_masks.swapaxes(1, 2)
    by_keys = visited(block_lists(found.transposed_by_keys()), flipped, near.swapaxes(1, 2), BLOCK[::-1])
    assert (by_keys == pairs.swapaxes(1, 2)).all()


@pytest.mark.parametrize("kind", ["band", "scattered", "by head"])
def test_block_map_of_a_shard_has_its_heads_and_queries(kind):
    pattern = pattern_of(kind, 24, 20)
    whole, near = attended(record(24, 20, pattern))
    for head, part in np.ndindex(2, 3):
        origin = jnp.array([0, head, part * 8, 0], jnp.int32)
        call = record(8, 20, pattern, heads=1, dropout_origin=origin)
        found = block_map(call, 4, 4)
        mine = whole[head : head + 1, part * 8 : part * 8 + 8]
        assert (visited(block_lists(found), found.tile_masks, near[:1, :8], (4, 4), 1) == mine).all()


def test_equal_tile_masks_are_kept_once():
    found = block_map(record(256, 256, LocalMask((256, 256), (16, 0))), 16, 16)
    assert found.tile_masks.shape[0] == 4  # all, none, the diagonal and the window's edge
    assert block_lists(found).blocks.shape[-1] == 2


def test_traced_segments_keep_the_lists_as_short_as_the_pattern_makes_them():
    ids = jnp.zeros((1, 64), jnp.int32)
    call = record(64, 64, LocalMask((64, 64), (8, 0)), q_segment_ids=ids, kv_segment_ids=ids)
    assert jax.eval_shape(lambda: block_lists(block_map(call, 8, 8)).blocks).shape == (1, 1, 8, 2)


def test_patterns_refuse_uneven_shards_of_queries_or_keys():
    pattern = LocalMask((24, 20), (1, 1))
    assert pattern_refusals(record(8, 20, pattern)) == ()
    assert "24 queries has no even parts of 9" in pattern_refusals(record(9, 20, pattern))[0]
    assert "20 keys has no part of 10" in pattern_refusals(record(24, 10, pattern))[0]
    assert pattern_refusals(dataclasses.replace(record(9, 20), causal=True)) == ()
