"""`attention`: output and weights by the formula, what differentiates them, and its dropout."""

import dataclasses
import functools

import dense_calls
import jax
import jax.numpy as jnp
import naive
import numpy as np
import pytest
import transformed
from dense_calls import make, normal, some
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from ejkernel.modules import Attention, AttentionConfig, attention, create_default_executor, flash_attention
from ejkernel.types import MaskInfo

B, T, S, H, G, D = 2, 12, 12, 4, 2, 8
QUERY = jax.random.normal(jax.random.key(0), (B, T, H, D))
KEY, VALUE = jax.random.normal(jax.random.key(1), (2, B, S, G, D))
TILES = AttentionConfig(weights_block_q=5)
IDS = np.array([[0] * 7 + [1] * 4 + [-1] * 2, [0] * 13], np.int32)
DROPS = {"dropout_prob": 0.4, "deterministic": False}

CALLS = {
    "one token": make((1, 1, 6, 5), (2, 2)),
    "one query, eight heads a KV head": make((1, 129, 60, 5), (8, 1)),
    "long, causal": make((63, 63, 6, 6), (1, 1), causal=True),
    "129 queries, a window": make((129, 20, 4, 5), (1, 1), sliding_window=7),
    "bias, cap and mask": make(bias=normal(1, 4, 13, 21), mask=some(2, 1, 13, 21), logits_soft_cap=1.5),
    "causal window, sinks": make(causal=True, sliding_window=(4, 9), softmax_aux=normal(3), softmax_scale=0.3),
    "sinks by head, segments": make(
        (13, 13, 6, 5), softmax_aux=normal(4, 2), q_segment_ids=IDS, kv_segment_ids=IDS, bias=normal(2, 1, 13, 1)
    ),
    "positions": make(q_positions=np.arange(13)[None] * 2, kv_positions=np.arange(21)[None], causal=True),
    "dropout, mask by head": make(mask=some(1, 4, 13, 21), dropout_prob=0.3, dropout_seed=11, bias=normal(2, 4, 13, 1)),
}


def run(call, floats, **more):
    """The public call, in steps of a few rows."""
    given = {**dense_calls.options(call), "logits_soft_cap": call.logits_soft_cap, "cfg": TILES}
    rng = call.dropout_seed if call.dropout_prob else None
    if call.dropout_prob:
        given |= {"dropout_prob": call.dropout_prob, "deterministic": False}
    arrays = [floats["query"], floats["key"], floats["value"], floats.get("bias"), rng, floats.get("softmax_aux")]
    return attention(*arrays, **given, **more)


@pytest.mark.parametrize("name", CALLS)
def test_output_and_weights_are_the_formula_and_gradients_are_finite_differences(name):
    call = CALLS[name]
    with jax.enable_x64(True):
        output, weights = transformed.checked(functools.partial(run, call), dense_calls.arrays(call))
    np.testing.assert_allclose(output, dense_calls.output(call), rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(weights, dense_calls.weights(call), rtol=1e-11, atol=1e-12)


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    lengths=st.sampled_from([(1, 9), (9, 1), (9, 9)]),
    causal=st.booleans(),
    cap=st.sampled_from([None, 0.7]),
    seed=st.integers(0, 99),
)
def test_random_calls_match_the_formula(lengths, causal, cap, seed):
    mask = some(2, 1, *lengths, seed=seed)
    call = make((*lengths, 3, 2), (2, 1), seed, mask=mask, causal=causal, logits_soft_cap=cap)
    output, weights = transformed.quickly(lambda: run(call, dense_calls.arrays(call, jnp.float32)))()
    np.testing.assert_allclose(output, dense_calls.output(call), rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(weights, dense_calls.weights(call), rtol=2e-5, atol=2e-6)


def test_t13_an_int_window_reaches_as_far_on_both_sides_and_includes_its_ends():
    reached = np.asarray(attention(QUERY, KEY, VALUE, sliding_window=2)[1]) > 0
    steps = np.arange(S) - np.arange(T)[:, None]
    np.testing.assert_array_equal(reached, np.broadcast_to(abs(steps) <= 2, reached.shape))


def test_t18_rows_with_nothing_to_attend_are_zero_with_zero_gradients():
    mask = MaskInfo(_attention_mask=jnp.ones((B, 1, T, S), bool).at[:, :, 3].set(False))

    def compute(query):
        return attention(query, KEY, VALUE, mask_info=mask, cfg=TILES)

    output, weights = compute(QUERY)
    gradient = jax.grad(lambda query: compute(query)[0].sum() + (compute(query)[1] ** 2).sum())(QUERY)
    assert not np.asarray(output)[:, 3].any()
    assert not np.asarray(weights)[:, :, 3].any()
    assert not np.asarray(gradient)[:, 3].any()
    assert np.isfinite(gradient).all()
    np.testing.assert_allclose(np.asarray(weights)[:, :, 4].sum(axis=-1), 1, rtol=1e-5)


def test_t19_mask_and_bias_both_apply():
    call = CALLS["bias, cap and mask"]
    both = run(call, dense_calls.arrays(call, jnp.float32))[1]
    assert not np.asarray(both)[~np.broadcast_to(call.mask, both.shape)].any()
    for name in ("bias", "mask"):
        other = dataclasses.replace(call, **{name: None})
        assert not np.allclose(run(other, dense_calls.arrays(other, jnp.float32))[1], both, atol=1e-3), name


def test_t29_float32_stays_float32_unless_a_dtype_is_asked_for():
    output, weights = attention(QUERY, KEY, VALUE)
    assert output.dtype == weights.dtype == jnp.float32
    np.testing.assert_allclose(output, flash_attention(QUERY, KEY, VALUE), rtol=2e-5, atol=2e-6)
    halves = [x.astype(jnp.bfloat16) for x in (QUERY, KEY, VALUE)]
    for got in (attention(QUERY, KEY, VALUE, dtype=jnp.bfloat16), attention(QUERY, *halves[1:], dtype="bfloat16")):
        for one, other in zip(got, attention(*halves), strict=True):
            assert one.dtype == jnp.bfloat16
            np.testing.assert_array_equal(one, other)


def test_softmax_dtype_rounds_scores_and_wide_ones_round_nothing():
    call = make(logits_dtype="bfloat16")
    with jax.enable_x64(True):
        output, weights = run(call, dense_calls.arrays(call), softmax_dtype=jnp.bfloat16)
    np.testing.assert_allclose(output, dense_calls.output(call), rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(weights, dense_calls.weights(call), rtol=1e-11, atol=1e-12)
    plain = attention(QUERY, KEY, VALUE)[1]
    np.testing.assert_array_equal(attention(QUERY, KEY, VALUE, softmax_dtype=jnp.float32)[1], plain)
    np.testing.assert_array_equal(attention(QUERY, KEY, VALUE, softmax_dtype="float64")[1], plain)


def test_a_bias_of_kv_heads_counts_for_the_query_heads_that_read_them():
    bias = jax.random.normal(jax.random.key(2), (1, G, T, S))
    for got, want in zip(
        jax.value_and_grad(lambda x: (attention(QUERY, KEY, VALUE, x)[0] ** 2).sum())(bias),
        jax.value_and_grad(lambda x: (attention(QUERY, KEY, VALUE, jnp.repeat(x, H // G, axis=1))[0] ** 2).sum())(bias),
        strict=True,
    ):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)


def test_init_bias_is_called_exactly_where_there_is_no_bias_whatever_the_mask():
    bias = jax.random.normal(jax.random.key(3), (1, H, T, S))
    mask = MaskInfo(_attention_mask=jnp.ones((B, 1, T, S), bool).at[..., 2].set(False))
    want = attention(QUERY, KEY, VALUE, bias, mask_info=mask)[1]
    np.testing.assert_array_equal(attention(QUERY, KEY, VALUE, mask_info=mask, init_bias=lambda: bias)[1], want)

    def never():
        raise AssertionError("there is a bias")

    np.testing.assert_array_equal(attention(QUERY, KEY, VALUE, bias, mask_info=mask, init_bias=never)[1], want)


def test_integer_seeds_drop_as_flash_attention_does_and_dropout_needs_both_arguments():
    seeded = attention(QUERY, KEY, VALUE, None, 7, **DROPS)
    kept = [[naive.kept(7, b, h, i, j, 0.4) for j in range(S)] for b in range(B) for h in range(H) for i in range(T)]
    np.testing.assert_array_equal(np.asarray(seeded[1]) > 0, np.reshape(kept, (B, H, T, S)))
    want = flash_attention(QUERY, KEY, VALUE, dropout_prob=0.4, dropout_seed=7)
    np.testing.assert_allclose(seeded[0], want, rtol=2e-5, atol=2e-6)
    plain = attention(QUERY, KEY, VALUE)[1]
    np.testing.assert_array_equal(attention(QUERY, KEY, VALUE, None, 7, dropout_prob=0.4)[1], plain)
    np.testing.assert_array_equal(attention(QUERY, KEY, VALUE, None, 7, deterministic=False)[1], plain)
    np.testing.assert_array_equal(attention(QUERY, KEY, VALUE, None, 7 - 2**32, **DROPS)[1], seeded[1])


def test_keys_drop_weights_too_new_and_old_style_and_may_be_traced():
    drop = jax.jit(lambda rng: attention(QUERY, KEY, VALUE, None, rng, **DROPS)[1])
    one, other = drop(jax.random.key(1)), drop(jax.random.key(2))
    assert drop._cache_size() == 1
    assert 0.5 < (np.asarray(one) > 0).mean() < 0.7
    assert not np.array_equal(one, other)
    np.testing.assert_array_equal(drop(jax.random.key_data(jax.random.key(1))), one)
    transformed.close(attention(QUERY, KEY, VALUE, None, jax.random.key(1), **DROPS)[1], one)
    keys = jax.random.split(jax.random.key(3), 2)
    transformed.close(jax.vmap(drop)(keys)[1], drop(keys[1]))


def transformable(query, key, value, bias, seed, sinks):
    return attention(query, key, value, bias, seed, sinks, causal=True, logits_soft_cap=4.0, cfg=TILES, **DROPS)


def test_transformations_change_nothing():
    bias = jax.random.normal(jax.random.key(2), (B, 1, T, S))
    arrays = (QUERY, KEY, VALUE, bias, jnp.uint32(3), jnp.array([0.2, -0.4]))
    others = (QUERY + 1, KEY * 2, VALUE - 1, bias * 2, jnp.uint32(4), jnp.array([1.0, 0.0]))
    transformed.check_transforms(transformable, arrays, (0, 1, 2, 3, 5), others)
    transformed.check_no_new_compilations(transformable, arrays, others)


def test_a_mesh_changes_nothing_dropout_included():
    mesh = jax.make_mesh((2, 2, 2), ("dp", "sp", "tp"), devices=jax.devices()[:8])
    query, keys, weights = P("dp", "sp", "tp"), P("dp", None, "tp"), P("dp", "tp", "sp")
    arrays = (QUERY, KEY, VALUE, jax.random.normal(jax.random.key(2), (B, H, T, S)), 7, jnp.ones((H, 2)))
    given = {"causal": True, "cfg": TILES, **DROPS}

    def both(**options):
        def loss(arrays):
            output, weights = attention(*arrays[:4], 7, arrays[4], **given, **options)
            return (output**2).sum() + (weights**3).sum(), (output, weights)

        return transformed.quickly(jax.value_and_grad(loss, has_aux=True))((*arrays[:4], arrays[5]))

    got = both(mesh=mesh, in_specs=(query, keys, keys), out_specs=(query, weights))
    assert len(got[0][1][1].sharding.device_set) == 8
    transformed.close(got, both(), atol=1e-5)


def test_memory_of_the_forward_pass_beyond_its_results_is_linear():
    def bytes_at(length):
        shapes = [jax.ShapeDtypeStruct((1, length, heads, 16), jnp.float32) for heads in (2, 1, 1)]
        program = jax.jit(lambda *x: attention(*x, causal=True)).lower(*shapes).compile()
        return program.memory_analysis().temp_size_in_bytes

    short, long = bytes_at(2048), bytes_at(4096)
    assert long <= 2.1 * short
    assert long < 2 * 4096**2  # half of the weights of one head


def test_memory_of_the_gradient_is_linear_where_nobody_uses_the_weights():
    def bytes_at(length):
        shapes = [jax.ShapeDtypeStruct((1, length, heads, 16), jnp.float32) for heads in (2, 1, 1)]
        return transformed.temporary_bytes(lambda *x: attention(*x, causal=True)[0], shapes, (0, 1, 2))

    short, long = bytes_at(2048), bytes_at(4096)
    assert long <= 2.1 * short
    assert long < 2 * 4096**2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": QUERY[0]}, r"query: got shape \(12, 4, 8\), wants \[B, T, H, D\]"),
        (dict.fromkeys(("key", "value"), jnp.ones((B, S, 3, D))), "key: got .* 3 heads, wants a divisor of query's 4"),
        ({"value": VALUE.astype(jnp.bfloat16)}, "value: got dtype bfloat16, wants query's float32"),
        ({"value": VALUE.astype(int), "dtype": jnp.float32}, "value: got dtype int32, wants a floating dtype"),
        ({"bias": jnp.ones((B, 3, T, S))}, r"bias: got shape \(2, 3, 12, 12\), wants .*H=4 or 1"),
        ({"softmax_aux": jnp.ones((3, 2))}, r"softmax_aux: got shape \(3, 2\), wants"),
        ({"dropout_rng": jnp.ones(3), **DROPS}, r"dropout_rng: got .* float32\[3\], wants a JAX key, an int"),
        ({"dropout_rng": jnp.ones(3, int), **DROPS}, r"dropout_rng: got .* int32\[3\], wants a JAX key, an int"),
        ({"dropout_prob": 1.0}, "dropout_prob: got 1.0, wants a finite number"),
        ({"deterministic": None}, "deterministic: got NoneType None, wants True or False"),
        ({"dtype": jnp.int32}, "dtype: got .*, wants a floating dtype"),
        ({"softmax_dtype": "int8"}, "softmax_dtype: got str 'int8', wants a floating dtype"),
        ({"logits_soft_cap": 0}, "logits_soft_cap: got 0, wants a finite number > 0"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    given = {"query": QUERY, "key": KEY, "value": VALUE, **change}
    names = ("query", "key", "value", "bias", "dropout_rng", "softmax_aux")
    positional = [given.pop(name, None) for name in names]
    with pytest.raises(ValueError, match=message):
        attention(*positional, **given)


def test_kernel_objects_and_executors_call_it():
    executor = create_default_executor(enable_autotuning=False)
    want = attention(QUERY, KEY, VALUE, causal=True)
    for got in (
        executor(Attention(), QUERY, KEY, VALUE, causal=True),
        Attention().get_impl(TILES)(QUERY, KEY, VALUE, causal=True),
    ):
        transformed.close(got, want)
