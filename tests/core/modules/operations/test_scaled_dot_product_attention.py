"""`scaled_dot_product_attention`: the formula, JAX's own function, and the arguments it shares with nobody."""

import dataclasses
import functools

import dense_calls
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformed
from dense_calls import make, normal, some
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from ejkernel.modules import (
    FwdParams,
    ScaledDotProductAttention,
    ScaledDotProductAttentionConfig,
    create_default_executor,
    flash_attention,
    scaled_dot_product_attention,
)
from ejkernel.types import MaskInfo

B, T, S, H, G, D = 2, 12, 12, 4, 2, 8
QUERY = jax.random.normal(jax.random.key(0), (B, T, H, D))
KEY, VALUE = jax.random.normal(jax.random.key(1), (2, B, S, G, D))
TILES = ScaledDotProductAttentionConfig(block_q=8, block_k=8)
IDS = np.array([[0] * 7 + [1] * 4 + [-1] * 2, [0] * 13], np.int32)

CALLS = {
    "one token": make((1, 1, 6, 5), (2, 2)),
    "one query, eight heads a KV head": make((1, 129, 60, 5), (8, 1)),
    "long, causal": make((63, 63, 6, 6), (1, 1), causal=True),
    "129 queries, a window": make((129, 40, 4, 5), (1, 1), sliding_window=7),
    "causal window": make(causal=True, sliding_window=(4, 9), softmax_scale=0.3),
    "bias and mask": make(bias=normal(1, 4, 13, 21), mask=some(2, 1, 13, 21)),
    "bias of keys, segments": make((13, 13, 6, 5), bias=normal(2, 1, 1, 13), q_segment_ids=IDS, kv_segment_ids=IDS),
    "positions": make(q_positions=np.arange(13)[None] * 2, kv_positions=np.arange(21)[None], causal=True),
    "padded rows": make((13, 13, 6, 5), cum_seqlens_q=np.array([0, 13, 17]), causal=True),
}


def run(call, floats, **more):
    """The public call, with several small tiles."""
    lengths = [None if x is None else jnp.asarray(x, jnp.int32) for x in (call.cum_seqlens_q, call.cum_seqlens_k)]
    positional = [floats["query"], floats["key"], floats["value"], floats.get("bias"), *lengths]
    return scaled_dot_product_attention(*positional, **dense_calls.options(call), **{"cfg": TILES, **more})


@pytest.mark.parametrize("name", CALLS)
def test_output_is_the_formula_and_gradients_are_finite_differences(name):
    call = CALLS[name]
    with jax.enable_x64(True):
        output = transformed.checked(functools.partial(run, call), dense_calls.arrays(call))
    np.testing.assert_allclose(output, dense_calls.output(call), rtol=1e-11, atol=1e-12)


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    lengths=st.sampled_from([(1, 9), (9, 1), (9, 9)]),
    causal=st.booleans(),
    window=st.sampled_from([None, 1, (3, 0), (None, 2)]),
    seed=st.integers(0, 99),
)
def test_any_call_is_the_formula(lengths, causal, window, seed):
    mask = some(2, 1, *lengths, seed=seed)
    call = make((*lengths, 3, 2), (2, 1), seed, mask=mask, causal=causal, sliding_window=window)
    got = transformed.quickly(lambda: run(call, dense_calls.arrays(call, jnp.float32)))()
    np.testing.assert_allclose(got, dense_calls.output(call), rtol=2e-5, atol=2e-6)


def test_output_is_that_of_jax_dot_product_attention():
    bias, mask = jax.random.normal(jax.random.key(2), (B, H, T, S)), jnp.arange(S) != 4
    mask = jnp.broadcast_to(mask, (B, 1, T, S))
    given = {"scale": 0.4, "is_causal": True, "local_window_size": 5}
    want = jax.nn.dot_product_attention(QUERY, KEY, VALUE, bias, mask, **given)
    got = scaled_dot_product_attention(
        QUERY,
        KEY,
        VALUE,
        bias,
        mask_info=MaskInfo(_attention_mask=mask),
        softmax_scale=0.4,
        causal=True,
        sliding_window=5,
        cfg=TILES,
    )
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)


def test_t13_an_int_window_reaches_as_far_on_both_sides_and_includes_its_ends():
    unit = jnp.broadcast_to(jnp.eye(S)[:, None], (B, S, G, S))
    reached = np.asarray(scaled_dot_product_attention(QUERY, KEY, unit, sliding_window=2, cfg=TILES)) > 0
    steps = np.arange(S) - np.arange(T)[:, None]
    np.testing.assert_array_equal(reached, np.broadcast_to((abs(steps) <= 2)[:, None], reached.shape))


def test_t18_rows_with_nothing_to_attend_are_zero_with_zero_gradients():
    mask = jnp.ones((B, 1, T, S), bool).at[:, :, 3].set(False)

    def compute(query):
        return scaled_dot_product_attention(query, KEY, VALUE, mask_info=MaskInfo(_attention_mask=mask), cfg=TILES)

    output, gradient = transformed.graded(compute, (0,))(QUERY)[0], jax.grad(lambda q: compute(q).sum())(QUERY)
    assert np.all(np.asarray(output)[:, 3] == 0)
    assert np.all(np.asarray(gradient)[:, 3] == 0)
    assert np.isfinite(output).all()
    assert np.asarray(output)[:, 4].any()


def test_t19_mask_and_bias_both_apply():
    call = CALLS["bias and mask"]
    floats = dense_calls.arrays(call, jnp.float32)
    both = run(call, floats)
    for name in ("bias", "mask"):
        other = dataclasses.replace(call, **{name: None})
        assert not np.allclose(run(other, dense_calls.arrays(other, jnp.float32)), both, atol=1e-3), name


def test_t29_cum_seqlens_are_cumulative_and_never_lengths():
    row = QUERY[:1], KEY[:1], VALUE[:1]
    packed = scaled_dot_product_attention(*row, None, jnp.array([0, 5, 5, 12]), causal=True)
    for start, end in ((0, 5), (5, 12)):
        alone = scaled_dot_product_attention(*(x[:, start:end] for x in row), causal=True)
        np.testing.assert_allclose(packed[:, start:end], alone, rtol=2e-5, atol=2e-6)
    padded = scaled_dot_product_attention(QUERY, KEY, VALUE, None, jnp.array([0, 12, 19]))
    np.testing.assert_allclose(
        padded[1, :7], scaled_dot_product_attention(*(x[1:, :7] for x in (QUERY, KEY, VALUE)))[0], rtol=2e-5, atol=2e-6
    )
    assert not np.asarray(padded)[1, 7:].any()
    with pytest.raises(ValueError, match=r"cum_seqlens_q: got \[12, +7\], wants lengths that start at 0"):
        scaled_dot_product_attention(QUERY, KEY, VALUE, None, jnp.array([12, 7]))


def test_init_bias_is_called_exactly_where_there_is_no_bias():
    bias, calls = jax.random.normal(jax.random.key(3), (1, H, T, S)), []

    def init_bias():
        calls.append(1)
        return bias

    want = scaled_dot_product_attention(QUERY, KEY, VALUE, bias)
    np.testing.assert_array_equal(scaled_dot_product_attention(QUERY, KEY, VALUE, init_bias=init_bias), want)
    assert calls == [1]
    np.testing.assert_array_equal(scaled_dot_product_attention(QUERY, KEY, VALUE, bias, init_bias=init_bias), want)
    assert calls == [1]
    # A callable with no name of its own compiles nothing again, and gradients go through what it makes.
    with transformed.compilations() as compiled:
        scaled_dot_product_attention(QUERY, KEY, VALUE, init_bias=lambda: bias)
    assert not compiled
    slope = jax.grad(lambda x: scaled_dot_product_attention(QUERY, KEY, VALUE, init_bias=lambda: x).sum())(bias)
    assert np.asarray(slope).any()
    with pytest.raises(ValueError, match="init_bias: got int 3, wants a callable"):
        scaled_dot_product_attention(QUERY, KEY, VALUE, init_bias=3)


def transformable(query, key, value, bias, lengths):
    return scaled_dot_product_attention(query, key, value, bias, lengths, causal=True, cfg=TILES)


def test_transformations_change_nothing():
    bias = jax.random.normal(jax.random.key(2), (B, 1, T, S))
    arrays = (QUERY, KEY, VALUE, bias, jnp.array([0, 12, 19]))
    others = (QUERY + 1, KEY * 2, VALUE - 1, bias * 2, jnp.array([0, 0, 9]))
    transformed.check_transforms(transformable, arrays, (0, 1, 2, 3), others)
    transformed.check_no_new_compilations(transformable, arrays, others)


@pytest.mark.parametrize("spec", [P("dp", None, "tp"), P(None, ("dp", "tp"), None)], ids=["rows and heads", "queries"])
def test_a_mesh_changes_nothing(spec):
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), devices=jax.devices()[:4])
    bias = jax.random.normal(jax.random.key(2), (B, H, T, S))
    given = {"causal": True, "sliding_window": (5, 0), "cfg": TILES}
    specs = (spec, P(spec[0], None, spec[2]), P(spec[0], None, spec[2]))
    got = scaled_dot_product_attention(QUERY, KEY, VALUE, bias, **given, mesh=mesh, in_specs=specs, out_specs=spec)
    assert len(got.sharding.device_set) == 4
    want = scaled_dot_product_attention(QUERY, KEY, VALUE, bias, **given)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)


def test_memory_of_the_gradient_is_linear():
    def bytes_at(length):
        shapes = [jax.ShapeDtypeStruct((1, length, heads, 16), jnp.float32) for heads in (2, 1, 1)]
        return transformed.temporary_bytes(lambda *x: scaled_dot_product_attention(*x, causal=True), shapes, (0, 1, 2))

    short, long = bytes_at(3072), bytes_at(6144)
    assert short < long <= 2.1 * short
    assert long < 6144**2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": KEY[..., :4]}, r"key: got shape \(2, 12, 2, 4\), wants \[B=2, S, Hk, D=8\]"),
        ({"value": VALUE.astype(jnp.bfloat16)}, "value: got dtype bfloat16, wants query's float32"),
        ({"bias": jnp.ones((B, 3, T, S))}, r"bias: got shape \(2, 3, 12, 12\), wants .*H=4 or 1"),
        ({"sliding_window": 0}, "sliding_window: got int 0, wants an int >= 1"),
        ({"causal": 1}, "causal: got int 1, wants True or False"),
        ({"softmax_scale": float("nan")}, "softmax_scale: got nan, wants a finite number"),
        ({"mask_info": jnp.ones((B, T))}, "mask_info: got .*, wants a MaskInfo"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    given = {"query": QUERY, "key": KEY, "value": VALUE, **change}
    positional = [given.pop(name, None) for name in ("query", "key", "value", "bias")]
    with pytest.raises(ValueError, match=message):
        scaled_dot_product_attention(*positional, **given)


def test_configurations_say_tiles_for_both_passes_or_for_each():
    shared = ScaledDotProductAttentionConfig(block_q=16, num_warps=2)
    assert shared.part("forward") == FwdParams(q_blocksize=16, num_warps=2)
    assert shared.part("backward").q_blocksize == 16
    own = ScaledDotProductAttentionConfig(block_q=16, fwd_params={"q_blocksize": 32})
    assert own.part("forward").q_blocksize == 32
    assert own.part("backward").q_blocksize == 16
    assert ScaledDotProductAttentionConfig().part("forward") is None
    assert ScaledDotProductAttentionConfig.from_dict(own.to_dict()) == own
    with pytest.raises(ValueError, match="q_blocksize: got 0, wants a positive integer"):
        ScaledDotProductAttentionConfig(block_q=0)


def test_kernel_objects_and_executors_call_it():
    want = flash_attention(QUERY, KEY, VALUE, causal=True)
    executor = create_default_executor(enable_autotuning=False)
    for got in (
        executor(ScaledDotProductAttention(), QUERY, KEY, VALUE, causal=True),
        ScaledDotProductAttention().get_impl(TILES)(QUERY, KEY, VALUE, causal=True),
    ):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)
