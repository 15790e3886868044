"""MaskInfo under JAX transformations, and that reading it never changes it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.types import MaskInfo

DERIVED = [
    "attention_mask",
    "q_segment_ids",
    "kv_segment_ids",
    "cu_seqlens_q",
    "cu_seqlens_kv",
    "q_lens",
    "kv_lens",
    "is_multi_sequence",
    "q_attention_mask",
    "q_position_ids",
    "bias",
    "explicit_mask",
    "explicit_q_segment_ids",
    "explicit_kv_segment_ids",
    "explicit_cu_seqlens_q",
    "explicit_cu_seqlens_kv",
]
METHODS = {
    "materialize_attention_mask": lambda info: info.materialize_attention_mask(jnp.float32),
    "materialize_segment_ids": lambda info: info.materialize_segment_ids(),
    "to_dtype": lambda info: info.to_dtype(jnp.int32),
    "get_or_compute_attention_mask": lambda info: info.get_or_compute_attention_mask(),
    "get_or_compute_segment_ids": lambda info: info.get_or_compute_segment_ids(per_head=True),
    "get_or_compute_positions": lambda info: info.get_or_compute_positions(),
    "get_or_compute_qkv_cu_seqlens": lambda info: info.get_or_compute_qkv_cu_seqlens(max_segments=3),
    "get_qkv_masks": lambda info: info.get_qkv_masks(),
    "create_bias": lambda info: info.create_bias(jnp.bfloat16),
    "is_self_attention": lambda info: info.is_self_attention(),
    "replace": lambda info: info.replace(q_positions=None),
    "apply_causal": lambda info: info.apply_causal(jnp.int32(1)),
    "apply_sliding_window": lambda info: info.apply_sliding_window((1, 2)),
    "apply_sliding_window_decode": lambda info: info.apply_sliding_window((1, 0), mode="decode", index=jnp.int32(2)),
    "apply_sliding_window_prefill": lambda info: info.apply_sliding_window(3, mode="prefill"),
    "apply_chunked": lambda info: info.apply_chunked(2),
    "apply_kv_lengths": lambda info: info.apply_kv_lengths(jnp.int32(3), q_len=2, end_index=jnp.int32(3)),
    "apply_token_type_ids": lambda info: info.apply_token_type_ids(
        (jnp.ones((info.batch_size, info.q_len), jnp.int32), jnp.ones((info.batch_size, info.kv_len), jnp.int32))
    ),
}


def infos():
    ids = jnp.array([[0, 0, 1, -1], [2, 2, 2, 0]])
    explicit = jax.random.bernoulli(jax.random.key(3), 0.6, (2, 3, 4, 4))
    return {
        "cross": MaskInfo.from_segments(ids, jnp.array([[1, 0, 0, -1, 2], [2, 2, 0, 1, 1]])),
        "explicit": MaskInfo(_attention_mask=explicit[:, :1]),
        "packed": MaskInfo.from_cu_seqlens(jnp.array([0, 1, 3]), max_q_len=4),
    }


def assert_trees_equal(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        np.testing.assert_array_equal(a, b)
        assert jnp.asarray(a).dtype == jnp.asarray(b).dtype


def everything(info):
    return {name: getattr(info, name) for name in DERIVED} | {name: call(info) for name, call in METHODS.items()}


@pytest.mark.parametrize("kind", infos())
def test_derived_properties_are_the_same_under_jit_and_are_not_stored(kind):
    info = infos()[kind]
    before = dict(vars(info))
    expected = everything(info)
    compiled = jax.jit(everything)
    for _ in range(2):
        assert_trees_equal(compiled(info), expected)
    assert vars(info).keys() == before.keys()
    assert all(vars(info)[name] is value for name, value in before.items())


def test_t21_attention_mask_inside_jit_does_not_leak_a_tracer():
    """Reading a derived value under jit used to store the tracer on an object that outlives the trace."""
    info = MaskInfo.from_segments(jnp.array([[0, 0, 1]]))

    @jax.jit
    def touch(x):
        lengths = info.q_lens + info.cu_seqlens_q[1]
        return info.attention_mask.sum() + x + lengths.sum()

    with jax.checking_leaks():
        first = touch(1.0)
    assert touch(2.0) == first + 1
    assert not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(vars(info)))
    assert info.attention_mask.sum() == 5


def test_t21_lengths_work_under_jit():
    """`q_lens` and `kv_lens` used to read values on the host."""
    lengths = jax.jit(lambda info: (info.q_lens, info.kv_lens))(MaskInfo.from_segments(jnp.array([[0, 3, -1]])))
    assert [length.tolist() for length in lengths] == [[2], [2]]


def test_vmap_maps_over_the_leaves():
    ids = jnp.array([[[0, 0, 1]], [[0, 1, 1]], [[-1, 0, 0]]])
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[MaskInfo.from_segments(row) for row in ids])
    masks = jax.vmap(lambda info: info.apply_causal().attention_mask)(stacked)
    for row, mask in zip(ids, masks, strict=True):
        np.testing.assert_array_equal(mask, MaskInfo.from_segments(row).apply_causal().attention_mask)


def test_grad_and_checkpoint_go_through():
    info = MaskInfo.from_segments(jnp.array([[0, 0, 1]]))

    @jax.checkpoint
    def loss(scores, info):
        return jnp.where(info.attention_mask, scores, 0.0).sum()

    scores = jnp.ones((1, 1, 3, 3))
    expected = info.attention_mask.astype(jnp.float32)
    np.testing.assert_array_equal(jax.grad(loss)(scores, info), expected)
    np.testing.assert_array_equal(jax.jit(jax.grad(lambda s: loss(s, info)))(scores), expected)


def test_scan_carries_an_info():
    info = MaskInfo.from_segments(jnp.array([[0, 0, 1]]))
    carried, total = jax.lax.scan(lambda carry, _: (carry, carry.q_lens.sum()), info, length=3)
    assert total.tolist() == [3, 3, 3]
    assert_trees_equal(carried, info)


def test_unflattening_accepts_things_that_are_no_arrays():
    info = MaskInfo.from_attention_mask(jnp.ones((2, 3, 4, 4), bool)).apply_causal()
    axes = jax.tree.map(lambda _: 0, info)
    assert (axes._attention_mask, axes.q_positions, axes.causal_mask_baked_in) == (0, None, True)
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(info)]
    assert names == ["._attention_mask", "._q_segment_ids", "._kv_segment_ids"]
    abstract = jax.eval_shape(lambda: info)
    assert abstract.shape == (2, 4, 4)
    assert "attention_mask=(2, 3, 4, 4)" in repr(abstract)
    leaves, structure = jax.tree.flatten(info)
    assert_trees_equal(jax.tree.unflatten(structure, leaves), info)


def test_flags_and_axis_names_are_part_of_the_jit_key():
    traces = []

    @jax.jit
    def read(info):
        traces.append(info.baked_in_masks)
        return info.attention_mask

    plain = MaskInfo.from_random(1, 3)
    read(plain)
    read(plain.replace())
    assert len(traces) == 1
    read(plain.replace(chunked_mask_baked_in=True))
    assert traces[1] == {"causal": False, "sliding_window": False, "chunked": True, "token_type_ids": False}


def test_a_function_of_a_mask_info_is_exported_and_read_again():
    info = MaskInfo.from_segments(jnp.array([[0, 0, 1, 1, -1]]), batch_axis_name=("data", "fsdp")).apply_causal()
    exported = jax.export.export(jax.jit(lambda info: (info.bias, info.replace(q_positions=None))))(info)
    bias, returned = jax.export.deserialize(exported.serialize()).call(info)
    np.testing.assert_array_equal(bias, info.bias)
    assert returned.batch_axis_name == ("data", "fsdp")
    assert returned.qheads_axis_name == info.qheads_axis_name
    assert returned.causal_mask_baked_in
