"""First and last keys of queries of segments, and of warpgroups, against every pair looked at one by one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ejkernel.families.tiled_attention import TiledAttention
from ejkernel_pallas.gpu.hopper.sizes import WGMMA_M
from ejkernel_pallas.gpu.tiled_attention.config import ForwardTile
from ejkernel_pallas.gpu.tiled_attention.plan.block_map import key_block_ranges, pad_segment_ids
from ejkernel_pallas.gpu.tiled_attention.plan.key_ranges import (
    UNSORTED_MARK,
    key_ranges,
    position_key_ranges,
    position_limits,
)
from ejkernel_pallas.gpu.tiled_attention.spec import make_spec

MAX_BYTES = 2**31 - 1
PADDED = {"nowhere": (0, 0), "before": (3, 0), "after": (0, 3), "around": (2, 2)}


def ranges(q_ids, k_ids, **mask):
    """The first and last keys of a row's queries, and whether ids have to be compared."""
    q, k = (jax.ShapeDtypeStruct((1, len(ids), 1, 64), jnp.bfloat16) for ids in (q_ids, k_ids))
    q_ids, k_ids = (jnp.asarray(ids, jnp.int32)[None] for ids in (q_ids, k_ids))
    record = TiledAttention(
        query=q, key=k, value=k, softmax_scale=1.0, q_segment_ids=q_ids, kv_segment_ids=k_ids, **mask
    )
    made = key_ranges(make_spec(record), (pad_segment_ids(q_ids, 16, -1), pad_segment_ids(k_ids, 8, -2)), 8)
    assert made.shape == (1, 2, -(-q.shape[1] // 16) * 16)
    first, last = np.asarray(made)[0]
    unsorted = last >= UNSORTED_MARK
    assert unsorted.all() == unsorted.any()
    return first, np.where(unsorted, last - UNSORTED_MARK, last), unsorted.any()


def attended(q_ids, k_ids, causal, window):
    """Which pairs attend, told pair by pair."""
    left, right = window or (None, None)
    pairs = np.zeros((len(q_ids), len(k_ids)), bool)
    for i, j in np.ndindex(pairs.shape):
        near = (left is None or j >= i - left) and (right is None or j <= i + right) and (not causal or j <= i)
        pairs[i, j] = near and q_ids[i] == k_ids[j] >= 0
    return pairs


def random_ids(seed, length, in_order, padded, largest):
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 4, length)
    ids = np.sort(ids) if in_order else ids
    before, after = PADDED[padded]
    ids[:before], ids[max(0, length - after) :] = -1, -1
    return np.where(ids == 3, largest, ids)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 999),
    lengths=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    in_order=st.booleans(),
    padded=st.sampled_from(sorted(PADDED)),
    largest=st.sampled_from([3, MAX_BYTES]),
    causal=st.booleans(),
    window=st.none() | st.tuples(st.none() | st.integers(0, 9), st.none() | st.integers(0, 9)),
)
def test_key_ranges_with_ids_mask_exactly_the_pairs_that_do_not_attend(
    seed, lengths, in_order, padded, largest, causal, window
):
    q_ids = random_ids(seed, lengths[0], False, "around", largest)
    k_ids = random_ids(seed + 1, lengths[1], in_order, padded, largest)
    first, last, unsorted = ranges(q_ids, k_ids, causal=causal, sliding_window=window)
    assert not (unsorted and in_order)
    keys, queries = np.arange(len(k_ids)), slice(len(q_ids))
    seen = (keys >= first[queries, None]) & (keys <= last[queries, None])
    if unsorted:
        seen &= (q_ids[:, None] == k_ids) & (q_ids[:, None] >= 0)
    else:
        assert (last[len(q_ids) :] < first[len(q_ids) :]).all()  # of queries beyond the end
    np.testing.assert_array_equal(seen, attended(q_ids, k_ids, causal, window))


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 999),
    lengths=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    rows=st.tuples(st.sampled_from([1, 2]), st.sampled_from([1, 2])),
    in_order=st.booleans(),
    causal=st.booleans(),
    window=st.none() | st.tuples(st.none() | st.integers(0, 9), st.none() | st.integers(0, 9)),
)
def test_keys_by_position_mask_exactly_the_pairs_that_do_not_attend(seed, lengths, rows, in_order, causal, window):
    """Ranges and comparisons say which pairs attend; blocks outside a tile's range have none, and full blocks all."""
    rng, ((queries, keys), (block_q, block_kv)) = np.random.default_rng(seed), (lengths, (16, 8))
    q_positions = rng.integers(-5, keys + 5, (rows[0], queries))
    k_positions = rng.integers(-5, keys + 5, (rows[1], keys))
    k_positions = np.sort(k_positions, axis=1) if in_order else k_positions
    q, k = (jax.ShapeDtypeStruct((2, n, 1, 64), jnp.bfloat16) for n in lengths)
    positions = tuple(jnp.asarray(x, jnp.int32) for x in (q_positions, k_positions))
    fields = dict(zip(("q_positions", "kv_positions"), positions, strict=True))
    record = TiledAttention(query=q, key=k, value=k, softmax_scale=1.0, causal=causal, sliding_window=window, **fields)
    spec = make_spec(record)
    assume(spec.has_positions)
    limits = position_limits(spec, *positions, block_q)
    first, last = np.moveaxis(np.asarray(position_key_ranges(limits)), 1, 0)[..., None]
    unsorted = last >= UNSORTED_MARK
    assert not (in_order and unsorted.any())
    low, high = np.moveaxis(np.asarray(limits.limits), 1, 0)[..., None]
    index = np.arange(keys)
    seen = (index >= first) & (index <= np.where(unsorted, last - UNSORTED_MARK, last))
    seen = seen & (~unsorted | ((low <= k_positions[:, None]) & (k_positions[:, None] <= high)))
    distance = k_positions[:, None] - q_positions[..., None]
    left, right = spec.left_window, spec.right_window
    expected = (left is None or distance >= -left) & (right is None or distance <= right) & np.ones_like(distance, bool)
    np.testing.assert_array_equal(seen[:, :queries], np.broadcast_to(expected, seen[:, :queries].shape))
    assert not seen[:, queries:].any()
    table = np.asarray(key_block_ranges(spec, None, block_q, block_kv, positions))
    for row, tile in np.ndindex(table.shape[:2]):
        pairs = expected[row, tile * block_q : (tile + 1) * block_q]
        begin, full_start, full_end, end = table[row, tile] * block_kv
        assert not pairs[:, :begin].any()
        assert not pairs[:, end:].any()
        assert pairs[:, full_start:full_end].all()
        assert full_end <= max(keys, full_start)
        # Before the full blocks, kernels test the lower bound alone where keys are in order.
        if in_order and full_end > full_start:
            assert (right is None) or (distance[row, tile * block_q : (tile + 1) * block_q, :full_start] <= right).all()


def test_padding_between_keys_of_a_segment_makes_ids_be_compared():
    first, last, unsorted = ranges([0, 0, 0], [0, -1, 0])
    assert unsorted
    assert first[:3].tolist() == [0, 0, 0]
    assert last[:3].tolist() == [2, 2, 2]


@pytest.mark.parametrize("right", [None, 0, 1, 30, 64])
@pytest.mark.parametrize("queries", [64, 128, 192])
@pytest.mark.parametrize("keys", [64, 128, 192])
def test_first_warpgroup_may_end_early_if_its_keys_end_in_an_earlier_block(queries, keys, right):
    q = jax.ShapeDtypeStruct((1, 4096, 1, 64), jnp.bfloat16)
    window = None if right is None else (None, right)
    spec = make_spec(TiledAttention(query=q, key=q, value=q, softmax_scale=1.0, sliding_window=window))
    rows = np.arange(64 * 192).reshape(-1, queries // WGMMA_M, WGMMA_M).max(axis=-1)  # the last of every warpgroup
    ends = (rows + (right or 0)) // keys
    uneven = right is not None and bool((ends[:, :1] != ends).any())
    assert ForwardTile(queries // WGMMA_M, keys, 2, 2).first_warpgroup_may_end_early(spec) == uneven
