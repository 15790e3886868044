"""Cumulative lengths <-> masks and ids, and MaskInfo.from_cu_seqlens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ejkernel.types import MaskInfo
from ejkernel.types.mask import (
    attention_mask_to_qkv_cu_seqlens,
    cu_seqlens_to_mask,
    cu_seqlens_to_segment_ids,
    qkv_cu_seqlens_to_attention_mask,
    qkv_cu_seqlens_to_qkv_masks,
    qkv_masks_to_cu_seqlens,
    segment_ids_to_cu_seqlens,
)

few = settings(max_examples=30, deadline=None, derandomize=True)
lengths_of_four = st.lists(st.integers(0, 3), min_size=4, max_size=4)
TOTAL = 12


def cumulative(lengths):
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def loop_ids(lengths, total):
    ids = [sequence for sequence, length in enumerate(lengths) for _ in range(length)]
    return ids + [-1] * (total - len(ids))


def loop_positions(lengths, total, pad_value):
    positions = [place for length in lengths for place in range(length)]
    return positions + [pad_value] * (total - len(positions))


@few
@given(lengths_of_four)
def test_packed_row_of_ids_skips_empty_sequences(lengths):
    ids = cu_seqlens_to_segment_ids(cumulative(lengths), TOTAL)
    assert ids.tolist() == [loop_ids(lengths, TOTAL)]
    assert segment_ids_to_cu_seqlens(ids, max_segments=4).tolist() == cumulative(lengths).tolist()


def test_counting_ids_ignores_padding_and_ids_beyond_the_limit():
    ids = jnp.array([[-1, 0, 5, 2], [2, -7, 0, 0]])
    assert segment_ids_to_cu_seqlens(ids, max_segments=3).tolist() == [0, 3, 3, 5]


@few
@given(st.lists(st.integers(0, 4), min_size=3, max_size=3))
def test_padded_rows_round_trip(lengths):
    cu = cumulative(lengths)
    mask = cu_seqlens_to_mask(cu, 4)
    assert mask.tolist() == [[token < length for token in range(4)] for length in lengths]
    back_q, back_kv = qkv_masks_to_cu_seqlens(mask)
    assert back_q.tolist() == back_kv.tolist() == cu.tolist()


def test_pairwise_mask_of_padded_rows():
    cu_q, cu_kv = jnp.array([0, 2, 2, 3]), jnp.array([0, 1, 3, 6])
    q_valid, kv_valid = qkv_cu_seqlens_to_qkv_masks(cu_q, max_q_len=2, cu_seqlens_kv=cu_kv, max_kv_len=3)
    assert q_valid.tolist() == [[True, True], [False, False], [True, False]]
    assert kv_valid.tolist() == [[True, False, False], [True, True, False], [True, True, True]]
    mask = qkv_cu_seqlens_to_attention_mask(cu_q, max_q_len=2, cu_seqlens_kv=cu_kv, max_kv_len=3, dtype=jnp.int32)
    assert mask.shape == (3, 1, 2, 3)
    assert mask.dtype == jnp.int32
    np.testing.assert_array_equal(mask[:, 0], np.asarray(q_valid)[:, :, None] & np.asarray(kv_valid)[:, None, :])
    back_q, back_kv = attention_mask_to_qkv_cu_seqlens(jnp.asarray(mask)[2:])
    assert back_q.tolist() == [0, 1]
    assert back_kv.tolist() == [0, 3]


def test_keys_default_to_the_queries():
    mask = qkv_cu_seqlens_to_attention_mask(jnp.array([0, 2, 3]), max_q_len=2)
    assert mask[:, 0].tolist() == [[[True, True], [True, True]], [[True, False], [False, False]]]


@pytest.mark.parametrize(("reduce_heads", "q", "kv"), [("any", 2, 2), ("all", 1, 1), ("first", 1, 2)])
def test_heads_are_reduced_as_asked(reduce_heads, q, kv):
    heads = jnp.array([[[[1, 1], [0, 0]], [[1, 0], [1, 0]]]])
    cu_q, cu_kv = attention_mask_to_qkv_cu_seqlens(heads, reduce_heads=reduce_heads)
    assert (cu_q.tolist(), cu_kv.tolist()) == ([0, q], [0, kv])


def test_validity_mask_of_rank_two_serves_both_sides():
    cu_q, cu_kv = attention_mask_to_qkv_cu_seqlens(jnp.array([[1, 1, 0], [1, 0, 0]]), out_dtype=jnp.int16)
    assert cu_q.dtype == jnp.int16
    assert cu_q.tolist() == cu_kv.tolist() == [0, 2, 3]


def test_t22_from_cu_seqlens_takes_an_odd_length_cumulative_vector():
    """[N + 1] with N even used to be rejected for its odd length."""
    info = MaskInfo.from_cu_seqlens(jnp.array([0, 3, 5]), max_q_len=6)
    assert info.q_segment_ids.tolist() == info.kv_segment_ids.tolist() == [[0, 0, 0, 1, 1, -1]]
    assert info.q_lens.tolist() == info.kv_lens.tolist() == [3, 2]


def test_t22_from_cu_seqlens_does_not_read_an_even_length_vector_as_pairs():
    """[0, 2, 2, 5] used to mean the ranges 0..2 and 2..5 of two rows."""
    info = MaskInfo.from_cu_seqlens(jnp.array([0, 2, 2, 5]), max_q_len=5)
    assert info.batch_size == 1
    assert info.q_segment_ids.tolist() == [[0, 0, 2, 2, 2]]
    assert info.q_lens.tolist() == [2, 0, 3]


@few
@given(lengths_of_four, lengths_of_four)
def test_from_cu_seqlens_is_the_loop_over_sequences(q_lengths, kv_lengths):
    info = MaskInfo.from_cu_seqlens(
        jnp.asarray(cumulative(q_lengths)),
        max_q_len=TOTAL,
        cu_seqlens_kv=jnp.asarray(cumulative(kv_lengths)),
        max_kv_len=TOTAL + 1,
    )
    assert info.explicit_mask is None
    mask = np.zeros((TOTAL, TOTAL + 1), bool)
    q_start = kv_start = 0
    for q_length, kv_length in zip(q_lengths, kv_lengths, strict=True):
        mask[q_start : q_start + q_length, kv_start : kv_start + kv_length] = True
        q_start, kv_start = q_start + q_length, kv_start + kv_length
    np.testing.assert_array_equal(info.attention_mask[0, 0], mask)
    assert info.q_positions.tolist() == [loop_positions(q_lengths, TOTAL, -1)]
    assert info.kv_positions.tolist() == [loop_positions(kv_lengths, TOTAL + 1, 2**31 - 1)]


def test_causal_rule_of_packed_rows_with_own_key_lengths_restarts_in_every_sequence():
    info = MaskInfo.from_cu_seqlens(
        jnp.array([0, 2, 5]), max_q_len=5, cu_seqlens_kv=jnp.array([0, 4, 6]), max_kv_len=6
    ).apply_causal()
    expected = np.zeros((5, 6), bool)
    for q_start, q_length, kv_start, kv_length in ((0, 2, 0, 4), (2, 3, 4, 2)):
        for i in range(q_length):
            for j in range(kv_length):
                expected[q_start + i, kv_start + j] = j <= i
    np.testing.assert_array_equal(info.attention_mask[0, 0], expected)


def test_from_cu_seqlens_works_with_traced_values():
    @jax.jit
    def build(cu):
        info = MaskInfo.from_cu_seqlens(cu, max_q_len=6)
        return info, info.attention_mask, info.cu_seqlens_q, info.q_lens, info.get_or_compute_positions()

    for vector in ([0, 1, 4], [0, 0, 6]):
        info, mask, cu, lengths, (q_positions, _) = build(jnp.array(vector))
        eager = MaskInfo.from_cu_seqlens(jnp.array(vector), max_q_len=6)
        np.testing.assert_array_equal(mask, eager.attention_mask)
        assert cu.tolist() == info.cu_seqlens_kv.tolist() == vector
        assert lengths.tolist() == np.diff(vector).tolist()
        np.testing.assert_array_equal(q_positions, eager.q_position_ids)


def test_positions_are_stored_only_where_the_index_does_not_give_them():
    cu = jnp.array([0, 2, 3])
    assert MaskInfo.from_cu_seqlens(cu, max_q_len=3).q_positions is None
    own = MaskInfo.from_cu_seqlens(cu, max_q_len=3, cu_seqlens_kv=cu, q_positions=jnp.array([[5, 6, 7]]))
    assert own.q_positions.tolist() == [[5, 6, 7]]
    assert own.kv_positions.tolist() == [[0, 1, 0]]


def test_stored_lengths_survive_a_causal_rule_but_not_new_ids():
    info = MaskInfo.from_cu_seqlens(jnp.array([0, 2, 3]), max_q_len=3)
    assert info.apply_causal().explicit_cu_seqlens_q.tolist() == [0, 2, 3]
    assert info.materialize_attention_mask().explicit_cu_seqlens_kv.tolist() == [0, 2, 3]
    assert info.apply_chunked(1).explicit_cu_seqlens_q is None


def test_lengths_are_counted_from_ids_where_none_are_stored():
    info = MaskInfo.from_segments(jnp.array([[1, 1, 3, -1]]), jnp.array([[1, 3]]))
    cu_q, cu_kv = info.get_or_compute_qkv_cu_seqlens(max_segments=4, out_dtype=jnp.int16)
    assert (cu_q.tolist(), cu_kv.tolist()) == ([0, 0, 2, 2, 3], [0, 0, 1, 1, 2])
    assert cu_q.dtype == jnp.int16
    assert info.cu_seqlens_q.shape == (129,)


def test_no_sequences_at_all():
    info = MaskInfo.from_cu_seqlens(jnp.array([0]), max_q_len=3)
    assert info.q_segment_ids.tolist() == [[-1, -1, -1]]
    assert info.q_lens.shape == (0,)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cu_seqlens_q": np.array([1, 2])}, "cu_seqlens_q must start with 0"),
        ({"cu_seqlens_q": np.array([0, 3, 2])}, "cu_seqlens_q must not decrease"),
        ({"cu_seqlens_q": [0, 9]}, "cu_seqlens_q ends at 9, but the row it describes is only 4 long"),
        ({"cu_seqlens_q": jnp.zeros((2, 2), jnp.int32)}, r"cu_seqlens_q: got shape \(2, 2\)"),
        ({"cu_seqlens_q": jnp.zeros(0, jnp.int32)}, r"cu_seqlens_q: got shape \(0,\)"),
        ({"cu_seqlens_q": jnp.zeros(3)}, "cu_seqlens_q must hold integers"),
        ({"cu_seqlens_q": jnp.array([0, 2]), "max_q_len": jnp.array(4)}, "max_q_len must be a Python int"),
        (
            {"cu_seqlens_q": jnp.array([0, 2]), "cu_seqlens_kv": jnp.array([0, 1, 2])},
            r"cu_seqlens_kv: got shape \(3,\), wants \[sequences \+ 1=2\]",
        ),
    ],
)
def test_wrong_vectors_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        MaskInfo.from_cu_seqlens(**{"max_q_len": 4} | arguments)


def test_lists_with_traced_numbers_are_accepted():
    info = jax.jit(lambda n: MaskInfo.from_cu_seqlens([0, n, 4], max_q_len=4))(jnp.int32(1))
    assert info.q_segment_ids.tolist() == [[0, 1, 1, 1]]


def test_lengths_cannot_express_padding_in_front():
    with pytest.raises(ValueError, match="q_mask has padding before a valid token"):
        qkv_masks_to_cu_seqlens(np.array([[0, 1, 1]]))


def test_wrong_arguments_of_the_conversions_are_named():
    cu = jnp.array([0, 2])
    with pytest.raises(ValueError, match=r"q_mask: got shape \(2,\)"):
        qkv_masks_to_cu_seqlens(jnp.ones(2, bool))
    with pytest.raises(ValueError, match="reduce_heads must be one of 'any', 'all', 'first', got 'mean'"):
        attention_mask_to_qkv_cu_seqlens(jnp.ones((1, 1, 2, 2)), reduce_heads="mean")
    with pytest.raises(ValueError, match="cu_seqlens_kv: got shape"):
        qkv_cu_seqlens_to_qkv_masks(cu, max_q_len=2, cu_seqlens_kv=cu[None])
    with pytest.raises(ValueError, match=r"cu_seqlens_kv: got shape \(3,\), wants \(2,\)"):
        qkv_cu_seqlens_to_attention_mask(cu, max_q_len=2, cu_seqlens_kv=jnp.array([0, 1, 2]))
    with pytest.raises(ValueError, match="max_len must be at least 0, got -1"):
        cu_seqlens_to_mask(cu, -1)
