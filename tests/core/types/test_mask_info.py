"""MaskInfo itself: constructors, what it derives, immutability, and JAX transformations."""

import copy
import dataclasses
import inspect
import pickle
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ejkernel.types import MaskInfo

few = settings(max_examples=15, deadline=None, derandomize=True)
KV_PADDING = 2**31 - 1


def loop_mask(q_ids, kv_ids, explicit=None):
    """[batch, heads, q_len, kv_len] of all parts, one pair at a time."""
    heads = 1 if explicit is None else explicit.shape[1]
    mask = np.zeros((len(q_ids), heads, len(q_ids[0]), len(kv_ids[0])), bool)
    for b, h, i, j in np.ndindex(mask.shape):
        same = q_ids[b][i] == kv_ids[b][j] and q_ids[b][i] >= 0
        mask[b, h, i, j] = same and (explicit is None or explicit[b, h, i, j] != 0)
    return mask


# --- constructors ---


@few
@given(
    hnp.arrays(np.int32, (2, 3), elements=st.integers(-2, 2)),
    hnp.arrays(np.int32, (2, 4), elements=st.integers(-2, 2)),
)
def test_from_segments_stores_ids_alone_and_means_the_segment_rule(q_ids, kv_ids):
    info = MaskInfo.from_segments(q_ids, kv_ids)
    assert info.explicit_mask is None
    assert (info.shape, info.q_positions, info.kv_positions) == ((2, 3, 4), None, None)
    np.testing.assert_array_equal(info.attention_mask, loop_mask(q_ids, kv_ids))


@few
@given(
    hnp.arrays(np.int32, (2, 3), elements=st.integers(-1, 1)),
    hnp.arrays(np.int32, (2, 4), elements=st.integers(-1, 1)),
    hnp.arrays(bool, (2, 2, 3, 4)),
)
def test_all_parts_that_are_stored_apply(q_ids, kv_ids, explicit):
    parts = {"_attention_mask": explicit, "_q_segment_ids": q_ids, "_kv_segment_ids": kv_ids}
    info = MaskInfo(**{name: jnp.asarray(part) for name, part in parts.items()})
    expected = loop_mask(q_ids, kv_ids, explicit)
    np.testing.assert_array_equal(info.attention_mask, expected)
    np.testing.assert_array_equal(info.bias == 0, expected)
    np.testing.assert_array_equal(info.get_qkv_masks()[2], expected)


def test_from_segments_of_a_validity_mask():
    info = MaskInfo.from_segments(jnp.array([[5, 1, 0]]), jnp.array([[True, False]]), is_attn_mask=True)
    assert info.explicit_mask is None
    assert info.explicit_q_segment_ids.tolist() == [[0, 0, -1]]
    assert info.explicit_kv_segment_ids.tolist() == [[0, -1]]


def test_boolean_ids_are_refused_because_false_would_be_a_segment():
    with pytest.raises(ValueError, match="q_segment_ids is boolean; pass is_attn_mask=True"):
        MaskInfo.from_segments(jnp.array([[True, False]]))


def test_from_attention_mask_of_a_validity_mask_stores_ids_alone():
    info = MaskInfo.from_attention_mask(jnp.array([[1, 1, 0], [0, 1, 1]]))
    assert info.explicit_mask is None
    assert info.q_segment_ids.tolist() == info.kv_segment_ids.tolist() == [[0, 0, -1], [-1, 0, 0]]


@few
@given(hnp.arrays(bool, (2, 2, 3, 4)))
def test_from_attention_mask_of_pairs_keeps_the_mask_and_its_padding(mask):
    info = MaskInfo.from_attention_mask(jnp.asarray(mask))
    np.testing.assert_array_equal(info.explicit_mask, mask)
    np.testing.assert_array_equal(info.attention_mask, mask)
    np.testing.assert_array_equal(info.q_segment_ids, np.where(mask.any(axis=(1, 3)), 0, -1))
    np.testing.assert_array_equal(info.kv_segment_ids, np.where(mask.any(axis=(1, 2)), 0, -1))


def test_from_attention_mask_adds_a_head_axis_and_inverts():
    hidden = jnp.array([[[0, 1], [0, 0]]])
    info = MaskInfo.from_attention_mask(hidden, mask_is_valid=False)
    assert info.attention_mask.tolist() == [[[[True, False], [True, True]]]]


def test_from_random_has_the_wanted_density_and_no_ids():
    info = MaskInfo.from_random(2, 40, 50, sparsity=0.25, seed=3)
    assert info.explicit_q_segment_ids is None
    assert info.explicit_mask.shape == (2, 1, 40, 50)
    assert 0.7 < float(info.explicit_mask.mean()) < 0.8
    np.testing.assert_array_equal(info.explicit_mask, MaskInfo.from_random(2, 40, 50, 0.25, 3).explicit_mask)
    assert (info.explicit_mask != MaskInfo.from_random(2, 40, 50, 0.25, 4).explicit_mask).any()
    assert MaskInfo.from_random(1, 3, sparsity=0.0).explicit_mask.all()
    assert not MaskInfo.from_random(1, 3, sparsity=1.0).explicit_mask.any()


def test_dynamic_init_uses_the_first_argument_that_is_not_none():
    given_info = MaskInfo.from_random(1, 2)
    ids, embeds = jnp.ones((2, 3), jnp.int32), jnp.ones((2, 3, 8))
    validity = jnp.array([[1, 2, 0]])  # only 1 is valid
    assert MaskInfo.dynamic_init(mask_info=given_info, input_ids=ids, attention_mask=validity) is given_info
    assert MaskInfo.dynamic_init(input_ids=ids, attention_mask=validity).q_segment_ids.tolist() == [[0, -1, -1]]
    for arguments in ({"input_ids": ids}, {"inputs_embeds": embeds}):
        info = MaskInfo.dynamic_init(**arguments)
        assert info.explicit_mask is None
        assert info.attention_mask.shape == (2, 1, 3, 3)
        assert info.attention_mask.all()
    assert MaskInfo.dynamic_init(attention_mask=jnp.ones((1, 1, 2, 3), bool)).shape == (1, 2, 3)


def test_axis_names_and_positions_are_kept_by_every_constructor():
    axes = {
        "batch_axis_name": "b",
        "qheads_axis_name": None,
        "kvheads_axis_name": ("k",),
        "sequence_axis_name": "s",
        "q_positions": np.array([[4, 5]]),
        "kv_positions": jnp.array([[6, 7]]),
    }
    made = [
        MaskInfo.from_segments(jnp.zeros((1, 2), jnp.int32), **axes),
        MaskInfo.from_attention_mask(jnp.ones((1, 2, 2)), **axes),
        MaskInfo.from_cu_seqlens(jnp.array([0, 2]), max_q_len=2, **axes),
        MaskInfo.from_random(1, 2, **axes),
    ]
    for info in made:
        moved = info.apply_causal()
        for name, value in axes.items():
            np.testing.assert_array_equal(getattr(moved, name), value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MaskInfo.from_segments(jnp.zeros((1, 2))), "q_segment_ids must hold integers"),
        (lambda: MaskInfo.from_segments(jnp.zeros(2, int)), r"q_segment_ids: got shape \(2,\), wants \[batch, q_len\]"),
        (
            lambda: MaskInfo.from_segments(jnp.zeros((2, 3), int), jnp.zeros((1, 3), int)),
            r"kv_segment_ids: got shape \(1, 3\), wants \[batch=2, kv_len\]",
        ),
        (
            lambda: MaskInfo.from_segments(jnp.zeros((2, 3), int), q_positions=jnp.zeros((2, 4), int)),
            r"q_positions: got shape \(2, 4\), wants \[batch=2, q_len=3\]",
        ),
        (lambda: MaskInfo.from_attention_mask(jnp.ones(3)), r"attention_mask: got shape \(3,\)"),
        (lambda: MaskInfo.from_attention_mask(np.array([[0.0, -1e9]])), "attention_mask must hold only 0 and 1"),
        (lambda: MaskInfo(_attention_mask=jnp.ones((1, 2, 2))), r"\[batch, heads or 1, q_len, kv_len\]"),
        (
            lambda: MaskInfo(
                _attention_mask=jnp.ones((1, 1, 2, 3)),
                _q_segment_ids=jnp.zeros((1, 2), int),
                _kv_segment_ids=jnp.zeros((1, 2), int),
            ),
            r"attention_mask: got shape \(1, 1, 2, 3\), wants \[batch=1, heads or 1, q_len=2, kv_len=2\]",
        ),
        (lambda: MaskInfo(_q_segment_ids=jnp.zeros((1, 2), int)), "q_segment_ids and kv_segment_ids must both be"),
        (
            lambda: MaskInfo(_cu_seqlens_q=jnp.array([0, 1]), _cu_seqlens_kv=jnp.array([0, 1])),
            "use MaskInfo.from_cu_seqlens",
        ),
        (lambda: MaskInfo.from_random(1, 2, sparsity=1.5), "sparsity must be from 0 to 1, got 1.5"),
        (lambda: MaskInfo.dynamic_init(), "one of mask_info, attention_mask, input_ids and inputs_embeds"),
        (lambda: MaskInfo.dynamic_init(input_ids=jnp.ones(3)), r"input_ids: got shape \(3,\)"),
        (lambda: MaskInfo.dynamic_init(inputs_embeds=jnp.ones((3, 2))), r"inputs_embeds: got shape \(3, 2\)"),
    ],
)
def test_wrong_arguments_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# --- what it derives ---


def test_sizes_come_from_what_is_stored():
    assert MaskInfo(_attention_mask=jnp.ones((2, 3, 4, 5), bool)).shape == (2, 4, 5)
    assert MaskInfo.from_segments(jnp.zeros((2, 4), int), jnp.zeros((2, 5), int)).shape == (2, 4, 5)
    positions = {"q_positions": jnp.zeros((2, 4), int), "kv_positions": jnp.zeros((2, 5), int)}
    assert MaskInfo(**positions).shape == (2, 4, 5)
    assert MaskInfo().shape == (None, None, None)


def test_empty_info_stores_nothing_and_says_so():
    info = MaskInfo()
    assert info.is_empty
    assert (info.explicit_mask, info.explicit_q_segment_ids, info.explicit_kv_segment_ids) == (None, None, None)
    assert not info.is_self_attention()
    assert info.get_or_compute_positions() == (None, None)
    assert repr(info) == "MaskInfo()"


@pytest.mark.parametrize(
    "name",
    [
        "attention_mask",
        "q_segment_ids",
        "kv_segment_ids",
        "cu_seqlens_q",
        "cu_seqlens_kv",
        "q_lens",
        "kv_lens",
        "bias",
        "q_attention_mask",
        "q_position_ids",
        "is_multi_sequence",
    ],
)
def test_empty_info_has_nothing_to_derive(name):
    with pytest.raises(ValueError, match="an empty MaskInfo says nothing about tokens"):
        getattr(MaskInfo(), name)


def test_lengths_are_valid_tokens_of_a_row():
    info = MaskInfo.from_segments(jnp.array([[0, 0, -1], [1, 2, 2]]), jnp.array([[-3, 0], [1, 1]]))
    assert info.q_lens.tolist() == [2, 3]
    assert info.kv_lens.tolist() == [1, 2]
    assert info.q_attention_mask.tolist() == [[1, 1, 0], [1, 1, 1]]


@pytest.mark.parametrize(
    ("ids", "several"),
    [([[0, 0, -1]], False), ([[4, 4, -1]], False), ([[0], [1]], False), ([[0, 1]], True), ([[-1, -1]], False)],
)
def test_is_multi_sequence_looks_for_two_ids_in_one_row(ids, several):
    assert bool(MaskInfo.from_segments(jnp.array(ids)).is_multi_sequence) is several


def test_positions_restart_per_segment_with_padding_out_of_reach():
    info = MaskInfo.from_segments(jnp.array([[0, 0, 3, -1]]), jnp.array([[-1, 3, 3]]))
    q_positions, kv_positions = info.get_or_compute_positions()
    assert q_positions.tolist() == info.q_position_ids.tolist() == [[0, 1, 0, -1]]
    assert kv_positions.tolist() == [[KV_PADDING, 0, 1]]


def test_stored_positions_win_one_side_at_a_time():
    info = MaskInfo.from_segments(jnp.array([[0, 0]]), q_positions=jnp.array([[8, 9]]))
    q_positions, kv_positions = info.get_or_compute_positions()
    assert (q_positions.tolist(), kv_positions.tolist()) == ([[8, 9]], [[0, 1]])
    assert info.kv_positions is None


@pytest.mark.parametrize(
    ("info", "answer"),
    [
        (MaskInfo(_attention_mask=np.ones((1, 1, 3, 3), bool)), True),
        (MaskInfo(_attention_mask=np.ones((1, 1, 3, 4), bool)), False),
        (MaskInfo(_q_segment_ids=np.array([[0, 1]]), _kv_segment_ids=np.array([[0, 1]])), True),
        (MaskInfo(_q_segment_ids=np.array([[0, 1]]), _kv_segment_ids=np.array([[1, 0]])), False),
        (MaskInfo(_q_segment_ids=np.array([[0, 1]]), _kv_segment_ids=np.array([[0, 1, 1]])), False),
    ],
)
def test_is_self_attention(info, answer):
    assert bool(info.is_self_attention()) is answer


def test_materializing_changes_what_is_stored_but_not_what_is_meant():
    info = MaskInfo.from_segments(jnp.array([[0, 0, 1, -1]]))
    as_mask = info.materialize_attention_mask(jnp.float32)
    assert as_mask.explicit_mask.dtype == jnp.bool_
    assert as_mask.attention_mask.dtype == jnp.float32
    np.testing.assert_array_equal(as_mask.attention_mask, info.attention_mask)
    as_ids = MaskInfo(_attention_mask=info.attention_mask).materialize_segment_ids()
    assert as_ids.explicit_q_segment_ids.tolist() == [[0, 0, 1, -1]]
    np.testing.assert_array_equal(as_ids.attention_mask, info.attention_mask)
    assert info.to_dtype(jnp.int32).attention_mask.dtype == jnp.int32


def test_ids_per_head_are_computed_but_never_stored():
    heads = np.stack([np.tri(3, dtype=bool), np.eye(3, dtype=bool)])[None]
    info = MaskInfo.from_attention_mask(jnp.asarray(heads))
    q_ids, _ = info.get_or_compute_segment_ids(per_head=True)
    assert q_ids.tolist() == [[[0, 0, 0], [0, 1, 2]]]
    with pytest.raises(ValueError, match="stored segment ids are shared by the heads"):
        info.materialize_segment_ids(per_head=True)
    segments = MaskInfo.from_segments(jnp.array([[0, 1]]))
    assert segments.get_or_compute_segment_ids(per_head=True)[0].tolist() == [[[0, 1]]]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_bias_is_zero_or_the_lowest_number(dtype):
    bias = MaskInfo.from_segments(jnp.array([[0, 1]])).create_bias(dtype)
    assert bias.dtype == dtype
    lowest = float(jnp.finfo(dtype).min)
    assert bias.astype(jnp.float32)[0, 0].tolist() == [[0.0, lowest], [lowest, 0.0]]


def test_mask_of_one_row_serves_the_whole_batch():
    triangle = jnp.tri(3, dtype=bool)[None, None]
    ids = jnp.array([[0, 0, 1], [0, 1, 1]])
    info = MaskInfo(_attention_mask=triangle, _q_segment_ids=ids, _kv_segment_ids=ids)
    assert info.batch_size == 2
    expected = loop_mask(ids.tolist(), ids.tolist(), np.broadcast_to(triangle, (2, 1, 3, 3)))
    np.testing.assert_array_equal(info.attention_mask, expected)


# --- immutability and replace ---


def test_fields_cannot_be_assigned():
    info = MaskInfo.from_random(1, 3)
    for name in ("_attention_mask", "q_positions", "causal_mask_baked_in", "anything"):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(info, name, None)


def test_t21_without_clears_a_stored_part():
    """None means "keep" in `replace`, and nothing used to clear a mask."""
    ids = jnp.array([[0, 0, 1]])
    info = MaskInfo.from_segments(ids).apply_causal().replace(q_positions=ids)
    assert info.replace().explicit_mask is info._attention_mask
    cleared = info.without("attention_mask")
    assert cleared.explicit_mask is None
    assert not cleared.causal_mask_baked_in
    np.testing.assert_array_equal(cleared.attention_mask, MaskInfo.from_segments(ids).attention_mask)
    without_ids = info.without("segment_ids", "positions")
    assert without_ids.explicit_q_segment_ids is None
    assert without_ids.q_positions is None
    assert without_ids.causal_mask_baked_in
    with pytest.raises(ValueError, match=r"without\(\) got \['mask'\]"):
        info.without("mask")


def test_replace_keeps_what_is_none():
    ids = jnp.array([[0, 0, 1]])
    info = MaskInfo.from_segments(ids).apply_causal()
    kept = info.replace(attention_mask=None, q_segment_ids=None, kv_segment_ids=None, cu_seqlens_q=None)
    assert kept.explicit_mask is info._attention_mask
    assert kept.explicit_q_segment_ids is ids
    assert kept.causal_mask_baked_in


def test_a_new_mask_replaces_the_segments():
    info = MaskInfo.from_segments(jnp.array([[0, 0, 1, -1]]))
    everything = jnp.ones((1, 1, 4, 4), bool)
    assert info.replace(attention_mask=everything).attention_mask.all()
    narrower = info.replace(attention_mask=everything[..., :2])  # as a window cuts columns
    assert narrower.shape == (1, 4, 2)


def test_a_new_mask_and_new_ids_both_apply():
    ids = jnp.array([[0, 0, 1]])
    info = MaskInfo.from_segments(ids)
    everything = jnp.ones((1, 1, 3, 4), bool)
    padded = jnp.array([[0, 0, 1, 0]])
    both = info.replace(attention_mask=everything, kv_segment_ids=padded)
    np.testing.assert_array_equal(both.attention_mask, loop_mask(ids.tolist(), padded.tolist(), everything))


def test_ids_of_one_side_complete_those_of_a_mask():
    triangle = jnp.tril(jnp.ones((1, 1, 3, 3), bool))
    info = MaskInfo(_attention_mask=triangle).replace(kv_segment_ids=jnp.array([[0, -1, 0]]))
    np.testing.assert_array_equal(info.explicit_q_segment_ids, [[0, 0, 0]])
    np.testing.assert_array_equal(info.attention_mask[0, 0, 2], [True, False, True])


def test_replace_drops_lengths_when_what_they_describe_changes():
    info = MaskInfo.from_cu_seqlens(jnp.array([0, 2]), max_q_len=2)
    other = jnp.array([[0, 1]])
    assert info.replace(batch_axis_name="b").explicit_cu_seqlens_q is not None
    assert info.replace(q_segment_ids=other, kv_segment_ids=other).explicit_cu_seqlens_q is None
    lengths = jnp.array([0, 1, 2])
    both = info.replace(q_segment_ids=other, kv_segment_ids=other, cu_seqlens_q=lengths, cu_seqlens_kv=lengths)
    assert both.explicit_cu_seqlens_kv is lengths


def test_replace_refuses_what_it_does_not_know_or_what_does_not_fit():
    info = MaskInfo.from_segments(jnp.array([[0, 1]]))
    with pytest.raises(ValueError, match="q_postions"):
        info.replace(q_postions=None)
    with pytest.raises(ValueError, match=r"attention_mask: got shape \(1, 1, 3, 3\)"):
        info.replace(attention_mask=jnp.ones((1, 1, 3, 3)), q_segment_ids=jnp.array([[0, 1]]))


def test_copies_and_pickles_keep_everything():
    info = MaskInfo.from_segments(jnp.array([[0, 0, 1]])).apply_causal()
    for other in (copy.copy(info), copy.deepcopy(info), pickle.loads(pickle.dumps(info))):
        assert jax.tree.structure(other) == jax.tree.structure(info)
        np.testing.assert_array_equal(other.attention_mask, info.attention_mask)


def test_example_in_the_docstring_runs(capsys):
    documentation = inspect.getdoc(MaskInfo) or ""
    code = documentation.split("```python\n")[1].split("```")[0]
    exec(textwrap.dedent(code), {})
    assert "██" in capsys.readouterr().out


def test_module_exports_what_the_contract_names():
    import ejkernel.types as types
    import ejkernel.types.mask as module

    conversions = {
        "mask_to_segment_ids",
        "segment_ids_to_mask",
        "segment_ids_to_qkv_masks",
        "qkv_masks_to_cu_seqlens",
        "cu_seqlens_to_mask",
        "qkv_cu_seqlens_to_qkv_masks",
        "qkv_cu_seqlens_to_attention_mask",
        "attention_mask_to_qkv_cu_seqlens",
    }
    assert conversions <= set(module.__all__)
    assert all(callable(getattr(module, name)) for name in conversions)
    assert set(types.__all__) == {"MaskInfo", "MaskSharding", "get_debug_mode", "set_debug_mode"}
