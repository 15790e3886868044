"""The apply_* methods of MaskInfo, against loops over pairs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ejkernel.types import MaskInfo

few = settings(max_examples=25, deadline=None, derandomize=True)
IDS = np.array([[0, 0, 0, 1, 1, -1], [2, 2, 3, 3, 3, 3]], np.int32)
TYPES = np.array([[1, 1, 0, 1, 2, 2], [0, 3, 3, 0, 1, 3]], np.int32)


def segments():
    return MaskInfo.from_segments(jnp.asarray(IDS))


def loop(info, keep):
    """The mask of `info` with `keep(row, query, key)` asked for every pair."""
    mask = np.array(info.attention_mask)
    for b, h, i, j in np.ndindex(mask.shape):
        mask[b, h, i, j] = mask[b, h, i, j] and keep(b, i, j)
    return mask


@pytest.mark.parametrize("offset", [0, 2, -1, np.array([0, 3])])
def test_apply_causal_keeps_keys_up_to_the_query(offset):
    info = segments().apply_causal(offset)
    shift = np.broadcast_to(offset, 2)
    np.testing.assert_array_equal(info.attention_mask, loop(segments(), lambda b, i, j: j <= i + shift[b]))
    assert info.baked_in_masks["causal"]
    assert info.explicit_mask is not None
    np.testing.assert_array_equal(info.q_segment_ids, IDS)


def test_causal_with_fewer_queries_than_keys_is_top_left():
    info = MaskInfo.from_segments(jnp.zeros((1, 2), int), jnp.zeros((1, 4), int)).apply_causal()
    assert info.attention_mask[0, 0].tolist() == [[True, False, False, False], [True, True, False, False]]


def test_causal_rule_compares_stored_positions():
    q_positions, kv_positions = jnp.array([[3, 7]]), jnp.array([[0, 5, 3, 9]])
    info = MaskInfo(_attention_mask=jnp.ones((1, 1, 2, 4), bool), q_positions=q_positions, kv_positions=kv_positions)
    assert info.apply_causal().attention_mask[0, 0].tolist() == [[True, False, True, False], [True, True, True, False]]
    window = info.apply_sliding_window((4, 2)).attention_mask[0, 0]
    assert window.tolist() == [[True, True, True, False], [False, True, True, True]]
    chunked = info.apply_chunked(4).attention_mask[0, 0]
    assert chunked.tolist() == [[True, False, True, False], [False, True, False, False]]


def test_positions_of_one_side_are_compared_with_indices_of_the_other():
    """A decoding step: the query's place is known, the keys lie in the order of the cache."""
    step = MaskInfo(_attention_mask=jnp.ones((2, 1, 1, 4), bool), q_positions=jnp.array([[1], [2]]))
    assert step.apply_causal().attention_mask[:, 0, 0].sum(axis=-1).tolist() == [2, 3]
    assert step.apply_sliding_window((0, None)).attention_mask[:, 0, 0].sum(axis=-1).tolist() == [3, 2]


@few
@given(st.integers(0, 3), st.integers(0, 3), st.integers(-2, 2))
def test_sliding_window_includes_both_ends(left, right, offset):
    info = segments().apply_sliding_window((left, right), offset=offset)
    expected = loop(segments(), lambda b, i, j: i + offset - left <= j <= i + offset + right)
    np.testing.assert_array_equal(info.attention_mask, expected)
    assert info.baked_in_masks["sliding_window"]


def test_sliding_window_of_one_number_and_of_open_sides():
    both = loop(segments(), lambda b, i, j: abs(i - j) <= 1)
    np.testing.assert_array_equal(segments().apply_sliding_window(1).attention_mask, both)
    np.testing.assert_array_equal(segments().apply_sliding_window(1, mode="default").attention_mask, both)
    behind = loop(segments(), lambda b, i, j: j >= i - 1)
    np.testing.assert_array_equal(segments().apply_sliding_window((1, None)).attention_mask, behind)
    ahead = loop(segments(), lambda b, i, j: j <= i)
    np.testing.assert_array_equal(segments().apply_sliding_window((None, 0)).attention_mask, ahead)


def test_window_and_chunk_may_be_traced():
    @jax.jit
    def windowed(left, chunk):
        return segments().apply_sliding_window((left, 0)).attention_mask, segments().apply_chunked(chunk).attention_mask

    for left, chunk in ((1, 2), (2, 3)):
        window_mask, chunk_mask = windowed(left, chunk)
        np.testing.assert_array_equal(window_mask, segments().apply_sliding_window((left, 0)).attention_mask)
        np.testing.assert_array_equal(chunk_mask, segments().apply_chunked(chunk).attention_mask)


@few
@given(st.integers(0, 5), st.integers(0, 5), st.integers(0, 1))
def test_decode_window_keeps_one_row_and_its_columns(first_index, second_index, offset):
    left, right = 2, 1
    positions = jnp.arange(6)[None]
    info = segments().replace(q_positions=positions, kv_positions=positions)
    index = jnp.array([first_index, second_index])
    part = info.apply_sliding_window((left, right), offset=offset, mode="decode", index=index)
    whole = np.asarray(info.apply_sliding_window((left, right), offset=offset).attention_mask)
    assert part.shape == (2, 1, 4)
    for b, i in enumerate((first_index, second_index)):
        start = min(max(i + offset - left, 0), 6 - 4)
        np.testing.assert_array_equal(part.attention_mask[b, 0, 0], whole[b, 0, i, start : start + 4])
        # All that the row attends to lies in the columns that are kept.
        assert part.attention_mask[b].sum() == whole[b, 0, i].sum()
        assert part.q_segment_ids[b].tolist() == [IDS[b, i]]
        assert part.kv_segment_ids[b].tolist() == IDS[b, start : start + 4].tolist()
        assert part.q_positions[b].tolist() == [i]
        assert part.kv_positions[b].tolist() == list(range(start, start + 4))


def test_decode_index_is_clipped_and_a_wide_window_keeps_all_columns():
    part = segments().apply_sliding_window(9, mode="decode", index=99)
    assert part.attention_mask.shape == (2, 1, 1, 6)
    np.testing.assert_array_equal(part.attention_mask[:, 0, 0], np.asarray(segments().attention_mask)[:, 0, 5])


@pytest.mark.parametrize(("window", "columns"), [(4, 4), ((2, 0), 3), (50, 6), (0, 1)])
def test_prefill_window_keeps_the_last_columns(window, columns):
    part = segments().apply_sliding_window(window, mode="prefill")
    whole = segments().apply_sliding_window(window)
    np.testing.assert_array_equal(part.attention_mask, np.asarray(whole.attention_mask)[..., -columns:])
    np.testing.assert_array_equal(part.kv_segment_ids, IDS[:, -columns:])
    np.testing.assert_array_equal(part.q_segment_ids, IDS)


@few
@given(st.integers(1, 7), st.integers(-1, 2))
def test_chunks_are_causal_and_become_the_ids(chunk_size, offset):
    info = segments().apply_chunked(chunk_size, offset)
    expected = loop(segments(), lambda b, i, j: i // chunk_size == j // chunk_size and j <= i + offset)
    np.testing.assert_array_equal(info.attention_mask, expected)
    np.testing.assert_array_equal(info.explicit_mask, expected)
    ids = np.where(IDS < 0, -1, np.arange(6) // chunk_size + 1)
    np.testing.assert_array_equal(info.q_segment_ids, ids)
    np.testing.assert_array_equal(info.kv_segment_ids, ids)
    assert info.baked_in_masks["chunked"]
    pattern = MaskInfo.create_chunked_attention_mask(chunk_size, 6, offset=offset)
    np.testing.assert_array_equal(expected, np.asarray(segments().attention_mask) & np.asarray(pattern))


def test_chunks_of_an_explicit_mask_keep_its_heads_and_its_empty_rows():
    mask = np.ones((1, 2, 4, 4), bool)
    mask[:, :, 2] = False
    info = MaskInfo(_attention_mask=jnp.asarray(mask)).apply_chunked(2)
    assert info.attention_mask.shape == (1, 2, 4, 4)
    assert info.q_segment_ids.tolist() == [[1, 1, -1, 2]]


def test_chunked_pattern_of_its_own():
    pattern = MaskInfo.create_chunked_attention_mask(2, 3, 5, dtype=jnp.int32)
    assert pattern.tolist() == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0]]


@few
@given(
    st.tuples(st.integers(0, 6), st.integers(0, 6)),
    st.tuples(st.integers(2, 6), st.integers(2, 6)),
    st.sampled_from([None, 1, 3, 8]),
)
def test_kv_lengths_keep_the_filled_keys_and_the_newest_rows(lengths, ends, window):
    positions = jnp.broadcast_to(jnp.arange(6), (2, 6))
    info = segments().replace(q_positions=positions, kv_positions=positions)
    step = info.apply_kv_lengths(jnp.array(lengths), q_len=2, end_index=jnp.array(ends), sliding_window=window)
    filled = loop(info, lambda b, i, j: j < lengths[b])
    width = 6 if window is None else min(window, 6)
    assert step.shape == (2, 2, width)
    for b in range(2):
        rows = slice(ends[b] - 2, ends[b])
        start = min(max(lengths[b] - width, 0), 6 - width)
        columns = slice(start, start + width)
        np.testing.assert_array_equal(step.attention_mask[b, 0], filled[b, 0, rows, columns])
        np.testing.assert_array_equal(step.q_segment_ids[b], IDS[b, rows])
        np.testing.assert_array_equal(step.kv_segment_ids[b], np.where(np.arange(6) < lengths[b], IDS[b], -1)[columns])
        np.testing.assert_array_equal(step.q_positions[b], np.arange(6)[rows])
        np.testing.assert_array_equal(step.kv_positions[b], np.arange(6)[columns])


def test_kv_lengths_of_a_mask_without_ids_and_one_number_for_all_rows():
    info = MaskInfo(_attention_mask=jnp.ones((2, 3, 4, 5), bool)).apply_kv_lengths(2, q_len=1, end_index=4)
    assert info.explicit_q_segment_ids is None
    assert info.attention_mask.shape == (2, 3, 1, 5)
    assert info.attention_mask[1, 2, 0].tolist() == [True, True, False, False, False]


def loop_same_type(zero_policy):
    same = np.zeros((2, 1, 6, 6), bool)
    for b, _, i, j in np.ndindex(same.shape):
        q_off = zero_policy in ("q", "both") and TYPES[b, i] == 0
        kv_off = zero_policy in ("kv", "both") and TYPES[b, j] == 0
        same[b, 0, i, j] = TYPES[b, i] == TYPES[b, j] and not q_off and not kv_off
    return same


@pytest.mark.parametrize("zero_policy", ["q", "kv", "both", "none"])
def test_t21_union_widens_across_segments_but_not_to_padding(zero_policy):
    """The segment ids used to cut what the union had added."""
    base = segments().apply_causal()
    info = base.apply_token_type_ids(jnp.asarray(TYPES), zero_policy=zero_policy)
    valid = (IDS >= 0)[:, None, :, None] & (IDS >= 0)[:, None, None, :]
    expected = (np.asarray(base.attention_mask) | loop_same_type(zero_policy)) & valid
    np.testing.assert_array_equal(info.attention_mask, expected)
    assert (expected & ~np.asarray(segments().attention_mask)).any(), "the case must cross a segment"
    np.testing.assert_array_equal(info.explicit_q_segment_ids, np.where(IDS < 0, -1, 0))
    np.testing.assert_array_equal(info.explicit_kv_segment_ids, np.where(IDS < 0, -1, 0))
    assert info.baked_in_masks["token_type_ids"]
    assert info.baked_in_masks["causal"]


def test_union_with_a_mask_without_ids():
    base = MaskInfo(_attention_mask=jnp.zeros((2, 1, 6, 6), bool))
    info = base.apply_token_type_ids(jnp.asarray(TYPES), zero_policy="none")
    np.testing.assert_array_equal(info.attention_mask, loop_same_type("none"))
    assert info.explicit_q_segment_ids is None


@pytest.mark.parametrize("zero_policy", ["q", "kv", "both", "none"])
@pytest.mark.parametrize("update", [None, True, False])
def test_intersect_narrows_whatever_becomes_of_the_ids(zero_policy, update):
    base = segments().apply_causal()
    info = base.apply_token_type_ids(
        jnp.asarray(TYPES), combine="intersect", zero_policy=zero_policy, update_segment_ids=update
    )
    expected = np.asarray(base.attention_mask) & loop_same_type(zero_policy)
    np.testing.assert_array_equal(info.attention_mask, expected)
    np.testing.assert_array_equal(info.explicit_mask, expected)
    if update is False:
        np.testing.assert_array_equal(info.q_segment_ids, IDS)
    else:
        live_zero = 0 if zero_policy in ("kv", "none") else -1
        np.testing.assert_array_equal(info.q_segment_ids, np.where(TYPES == 0, live_zero, TYPES))


@pytest.mark.parametrize("update", [None, True])
@pytest.mark.parametrize("zero_policy", ["q", "none"])
def test_replace_forgets_the_mask(zero_policy, update):
    info = segments().apply_token_type_ids(
        jnp.asarray(TYPES), combine="replace", zero_policy=zero_policy, update_segment_ids=update
    )
    np.testing.assert_array_equal(info.attention_mask, loop_same_type(zero_policy))


def test_replace_without_new_ids_keeps_the_padding():
    info = segments().apply_token_type_ids(jnp.asarray(TYPES), combine="replace", update_segment_ids=False)
    valid = (IDS >= 0)[:, None, :, None] & (IDS >= 0)[:, None, None, :]
    np.testing.assert_array_equal(info.attention_mask, loop_same_type("q") & valid)


@few
@given(
    hnp.arrays(np.int32, (1, 3), elements=st.integers(-1, 2)), hnp.arrays(np.int32, (1, 4), elements=st.integers(-1, 2))
)
def test_token_types_of_queries_and_keys_may_differ(q_types, kv_types):
    info = MaskInfo(_attention_mask=jnp.zeros((1, 1, 3, 4), bool)).apply_token_type_ids(
        (jnp.asarray(q_types), jnp.asarray(kv_types)), zero_policy="kv"
    )
    expected = [[q == k and k > 0 for k in kv_types[0]] for q in q_types[0]]
    np.testing.assert_array_equal(info.attention_mask[0, 0], expected)


def test_transforms_compose():
    info = segments().apply_causal().apply_sliding_window((1, 9)).apply_kv_lengths(5, q_len=3, end_index=6)
    expected = loop(segments(), lambda b, i, j: i - 1 <= j <= i and j < 5)[:, :, 3:]
    np.testing.assert_array_equal(info.attention_mask, expected)
    assert info.baked_in_masks == {"causal": True, "sliding_window": True, "chunked": False, "token_type_ids": False}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda i: i.apply_causal(jnp.zeros(3, int)),
            r"offset: got shape \(3,\), wants a single number or \[batch=2\]",
        ),
        (lambda i: i.apply_causal(0.5), "offset must hold integers"),
        (lambda i: i.apply_sliding_window(-1), "sliding_window must be at least 0, got -1"),
        (lambda i: i.apply_sliding_window(jnp.array([1, 2])), r"sliding_window: got shape \(2,\)"),
        (lambda i: i.apply_sliding_window(1, mode="train"), "mode must be one of .* got 'train'"),
        (lambda i: i.apply_sliding_window(1, mode="decode"), "needs index"),
        (lambda i: i.apply_sliding_window((1, None), mode="prefill"), "wants a limit on both sides"),
        (lambda i: i.apply_sliding_window((jnp.int32(1), 0), mode="prefill"), "must be a Python int"),
        (lambda i: i.apply_chunked(0), "chunk_size must be at least 1, got 0"),
        (lambda i: i.apply_kv_lengths(3), "needs q_len and end_index"),
        (lambda i: i.apply_kv_lengths(3, q_len=2), "needs q_len and end_index"),
        (lambda i: i.apply_kv_lengths(3, q_len=7, end_index=6), "q_len is 7, but the mask has only 6 rows"),
        (lambda i: i.apply_kv_lengths(jnp.zeros(3, int), q_len=1, end_index=1), r"kv_lengths: got shape \(3,\)"),
        (lambda i: i.apply_token_type_ids(jnp.asarray(TYPES), combine="xor"), "combine must be one of"),
        (lambda i: i.apply_token_type_ids(jnp.asarray(TYPES), zero_policy="all"), "zero_policy must be one of"),
        (lambda i: i.apply_token_type_ids(jnp.asarray(TYPES[:, :5])), r"q token_type_ids: got shape \(2, 5\)"),
        (
            lambda i: i.apply_token_type_ids(jnp.asarray(TYPES), update_segment_ids=True),
            "segment ids cannot express a union",
        ),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(segments())


@pytest.mark.parametrize(
    "call",
    [
        lambda i: i.apply_causal(),
        lambda i: i.apply_sliding_window(1),
        lambda i: i.apply_chunked(1),
        lambda i: i.apply_kv_lengths(1, q_len=1, end_index=1),
        lambda i: i.apply_token_type_ids(jnp.asarray(TYPES)),
    ],
)
def test_an_empty_info_has_nothing_to_restrict(call):
    with pytest.raises(ValueError, match="an empty MaskInfo"):
        call(MaskInfo())
