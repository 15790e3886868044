"""Segment ids <-> masks, against loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ejkernel.types.mask import (
    mask_to_segment_ids,
    segment_ids_to_mask,
    segment_ids_to_positions,
    segment_ids_to_qkv_masks,
)

few = settings(max_examples=40, deadline=None, derandomize=True)
ids_of = lambda *shape: hnp.arrays(np.int32, shape, elements=st.integers(-2, 3))  # noqa: E731


def loop_mask(q_ids, kv_ids):
    mask = np.zeros((len(q_ids), len(kv_ids)), bool)
    for i, q in enumerate(q_ids):
        for j, k in enumerate(kv_ids):
            mask[i, j] = q == k and q >= 0
    return mask


def loop_positions(ids, pad_value):
    positions, count = [], 0
    for i, segment in enumerate(ids):
        count = count + 1 if i and ids[i - 1] == segment else 0
        positions.append(count if segment >= 0 else pad_value)
    return positions


@few
@given(ids_of(2, 5), ids_of(2, 7))
def test_pairwise_mask_of_ids_is_the_segment_rule(q_ids, kv_ids):
    q_valid, kv_valid, mask = segment_ids_to_qkv_masks(q_ids, kv_ids)
    assert mask.shape == (2, 1, 5, 7)
    for row in range(2):
        np.testing.assert_array_equal(mask[row, 0], loop_mask(q_ids[row], kv_ids[row]))
    np.testing.assert_array_equal(q_valid, q_ids >= 0)
    np.testing.assert_array_equal(kv_valid, kv_ids >= 0)


def test_ids_of_one_array_serve_both_sides_and_set_the_dtype():
    ids = jnp.array([[1, 1, 2, -1]])
    mask = segment_ids_to_mask(ids, jnp.float32)
    assert mask.dtype == jnp.float32
    np.testing.assert_array_equal(mask[0, 0], loop_mask([1, 1, 2, -1], [1, 1, 2, -1]))
    assert isinstance(segment_ids_to_mask(ids, return_separate_masks=True), tuple)
    np.testing.assert_array_equal(segment_ids_to_qkv_masks(ids)[2], mask != 0)


@few
@given(ids_of(9), st.sampled_from([-1, 77]))
def test_positions_restart_in_every_segment(ids, pad_value):
    positions = segment_ids_to_positions(jnp.asarray(ids), pad_value=pad_value)
    assert positions.tolist() == loop_positions(ids, pad_value)


def test_positions_of_interleaved_padding_and_of_nothing():
    assert segment_ids_to_positions(jnp.array([[1, -1, 1, 1]])).tolist() == [[0, -1, 0, 1]]
    assert segment_ids_to_positions(jnp.zeros((2, 0), jnp.int32)).shape == (2, 0)


@few
@given(ids_of(6), ids_of(8))
def test_block_structured_mask_gives_ids_that_are_exactly_the_mask(q_ids, kv_ids):
    mask = loop_mask(q_ids, kv_ids)
    found = jax.jit(mask_to_segment_ids)(mask)
    np.testing.assert_array_equal(segment_ids_to_mask(found), mask)


@few
@given(hnp.arrays(bool, (5, 6)))
def test_ids_of_any_mask_never_hide_what_it_attends_to(mask):
    q_ids, kv_ids = mask_to_segment_ids(jnp.asarray(mask))
    np.testing.assert_array_equal(np.asarray(segment_ids_to_mask((q_ids, kv_ids))) & mask, mask)
    np.testing.assert_array_equal(q_ids < 0, ~mask.any(axis=1))
    np.testing.assert_array_equal(kv_ids < 0, ~mask.any(axis=0))


def test_blocks_are_numbered_by_their_first_query():
    mask = segment_ids_to_mask((jnp.array([7, 7, -1, 2, 5]), jnp.array([2, 7, 7, 9, 2])))
    q_ids, kv_ids = mask_to_segment_ids(mask)
    assert q_ids.tolist() == [0, 0, -1, 1, -1]
    assert kv_ids.tolist() == [1, 0, 0, -1, 1]


def test_t20_random_mask_is_not_misread_as_segments():
    """Ids of a mask that is no block structure used to be unrelated to it."""
    mask = np.asarray(jax.random.bernoulli(jax.random.key(0), 0.5, (4, 4)))
    assert len({row.tobytes() for row in mask}) > 1
    q_ids, kv_ids = mask_to_segment_ids(jnp.asarray(mask))
    assert set(q_ids.tolist()) | set(kv_ids.tolist()) <= {0, -1}
    assert (np.asarray(segment_ids_to_mask((q_ids, kv_ids))) & mask == mask).all()


def test_t20_causal_mask_is_not_misread_as_segments():
    """Every row of a triangle is different, which used to make every token a segment of its own."""
    q_ids, kv_ids = mask_to_segment_ids(jnp.tri(5, dtype=bool))
    assert q_ids.tolist() == kv_ids.tolist() == [0] * 5


def test_each_row_of_the_batch_is_judged_alone():
    blocks = loop_mask([0, 0, 1], [0, 1, 1])
    q_ids, _ = mask_to_segment_ids(jnp.stack([jnp.asarray(blocks), jnp.tri(3, dtype=bool)]))
    assert q_ids.tolist() == [[0, 0, 1], [0, 0, 0]]


def test_heads_are_joined_unless_each_is_asked_for():
    heads = np.stack([loop_mask([0, 0, 1], [0, 0, 1]), loop_mask([0, 1, 1], [0, 1, 1])])[None]
    q_ids, kv_ids = mask_to_segment_ids(jnp.asarray(heads))
    joined = np.asarray(segment_ids_to_mask((q_ids, kv_ids)))
    assert q_ids.shape == kv_ids.shape == (1, 3)
    assert (joined & heads == heads).all()
    ids = mask_to_segment_ids(jnp.asarray(heads), per_head=True)
    assert ids[0].tolist() == [[[0, 0, 1], [0, 1, 1]]]
    np.testing.assert_array_equal(segment_ids_to_mask(ids), heads)


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (2, 0, 0)])
def test_masks_with_an_axis_of_size_0_are_all_padding(shape):
    q_ids, kv_ids = mask_to_segment_ids(jnp.zeros(shape, bool))
    assert q_ids.shape == shape[:-1]
    assert kv_ids.shape == (*shape[:-2], shape[-1])
    assert (q_ids == -1).all()
    assert (kv_ids == -1).all()


def test_integer_masks_attend_where_they_are_not_zero():
    q_ids, _ = mask_to_segment_ids(jnp.array([[2, 0], [0, 0]]))
    assert q_ids.tolist() == [0, -1]


def test_wrong_ranks_are_named():
    with pytest.raises(ValueError, match=r"mask: got shape \(3,\)"):
        mask_to_segment_ids(jnp.ones(3, bool))
    with pytest.raises(ValueError, match="segment_ids: got shape"):
        segment_ids_to_mask(jnp.zeros((1, 1, 1, 1), jnp.int32))
    with pytest.raises(ValueError, match="kv segment_ids: got shape"):
        segment_ids_to_mask((jnp.zeros((1, 2), jnp.int32), jnp.zeros(2, jnp.int32)))
