"""`score_mod` and `mask_mod` of `flash_attention`, against dense attention in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import ejkernel
from ejkernel.modules import blocksparse_attention, flash_attention
from ejkernel.modules.operations.configs import FlashAttentionConfig
from ejkernel.ops import BwdParams, FwdParams, forward_mode, second_derivatives
from ejkernel.ops.call import _compiled_function
from ejkernel.types.pair_functions import score_function

KEYS = jax.random.split(jax.random.key(0), 5)
TOKENS, HEADS = 36, 4
QUERY, COTANGENT = jax.random.normal(KEYS[0], (2, 2, TOKENS, HEADS, 8))
KEY, VALUE = jax.random.normal(KEYS[1], (2, 2, TOKENS, 2, 8))
TABLE = jax.random.normal(KEYS[2], (HEADS, 32))
SINKS = jax.random.normal(KEYS[3], (HEADS, TOKENS))
DOCUMENTS = jnp.sort(jax.random.randint(KEYS[4], (2, TOKENS), 0, 4), axis=1)
TILES = FlashAttentionConfig(
    fwd_params=FwdParams(q_blocksize=7, kv_blocksize=5), bwd_params=BwdParams(q_blocksize=8, kv_blocksize=9)
)
SMALL = dict(rtol=2e-5, atol=2e-5)


def t5_bucket(distance, buckets=32, farthest=128):
    """The bucket of a distance `k - q`: exact up to 7, then logarithmic, the upper half for keys that come after."""
    half, near = buckets // 2, jnp.abs(distance)
    ratio = jnp.log(jnp.maximum(near, 1) / (half // 2)) / jnp.log(farthest / (half // 2))
    far = jnp.minimum(half // 2 + (ratio * (half - half // 2)).astype(jnp.int32), half - 1)
    return jnp.where(distance > 0, half, 0) + jnp.where(near < half // 2, near, far)


def window_of(index, height=6, width=6, side=3, shift=1):
    """The shifted window of a token of an image, by rows."""
    row, column = (index // width + shift) % height, (index % width + shift) % width
    return row // side * (width // side) + column // side


FUNCTIONS = {
    "alibi": lambda t: {"score_mod": lambda s, b, h, q, k: s - jnp.exp2(-2.0 * (h + 1)) * jnp.abs(q - k)},
    "t5": lambda t: {"score_mod": lambda s, b, h, q, k: s + t[h, t5_bucket(k - q)]},
    "soft cap": lambda t: {"score_mod": lambda s, b, h, q, k: 2.0 * jnp.tanh(s / 2.0)},
    "sinks of queries": lambda t: {"score_mod": lambda s, b, h, q, k: jnp.where(k == 0, t[h, q % 32], s)},
    "prefix": lambda t: {"mask_mod": lambda b, h, q, k: (k < 9 + 4 * b) | (k <= q)},
    "documents": lambda t: {"mask_mod": lambda b, h, q, k: (DOCUMENTS[b, q] == DOCUMENTS[b, k]) & (k <= q)},
    "swin": lambda t: {
        "mask_mod": lambda b, h, q, k: window_of(q) == window_of(k),
        "score_mod": lambda s, b, h, q, k: s + t[h, (q - k) % 9],
    },
}


def dense(query, key, value, score_mod=None, mask_mod=None):
    """Attention with arrays of all pairs."""
    (b, t, h, d), s = query.shape, key.shape[1]
    key, value = (jnp.repeat(x, h // x.shape[2], axis=2) for x in (key, value))
    indices = jnp.ogrid[:b, :h, :t, :s]
    scores = jnp.einsum("bthd,bshd->bhts", query, key) / d**0.5
    if score_mod is not None:
        scores = jnp.vectorize(score_mod)(scores, *indices)
    allowed = True if mask_mod is None else jnp.vectorize(mask_mod)(*indices)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(jnp.where(allowed, scores, -jnp.inf), axis=-1), value)


def results(attend, name, *arrays):
    """Value and gradients with respect to query, key, value and the table."""

    def loss(query, key, value, table):
        output = attend(query, key, value, **FUNCTIONS[name](table))
        return jnp.sum(output * COTANGENT), output

    (_, output), gradients = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True))(*arrays)
    return output, *gradients


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_those_of_dense_attention_with_their_gradients(name):
    def ours(*arrays, **functions):
        return flash_attention(*arrays, **functions, platform="xla", cfg=TILES)

    got = results(ours, name, QUERY, KEY, VALUE, TABLE)
    with jax.enable_x64(True):
        want = results(dense, name, *(jnp.asarray(x, jnp.float64) for x in (QUERY, KEY, VALUE, TABLE)))
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, **SMALL)
    learned = name in ("t5", "sinks of queries", "swin")
    assert (np.abs(want[-1]).max() > 1e-2) == learned


def test_a_mask_function_is_the_mask_it_describes():
    def band(b, h, q, k):
        return (k <= q) & (q - k <= 5)

    got = flash_attention(QUERY, KEY, VALUE, mask_mod=band, cfg=TILES)
    want = flash_attention(QUERY, KEY, VALUE, causal=True, sliding_window=(5, 0))
    np.testing.assert_allclose(got, want, **SMALL)
    both = flash_attention(QUERY, KEY, VALUE, mask_mod=lambda b, h, q, k: k <= q, sliding_window=(5, 9), cfg=TILES)
    np.testing.assert_allclose(both, want, **SMALL)
    heads_first = blocksparse_attention(*(x.swapaxes(1, 2) for x in (QUERY, KEY, VALUE)), mask_mod=band, causal=False)
    np.testing.assert_allclose(heads_first.swapaxes(1, 2), want, **SMALL)


def test_indices_of_shards_are_those_of_the_whole_call():
    mesh = jax.make_mesh((2, 2, 2), ("dp", "sp", "tp"), (jax.sharding.AxisType.Auto,) * 3)
    spec, keys = P("dp", "sp", "tp"), P("dp", None, "tp")

    def loss(table, **placed):
        def score_mod(score, b, h, q, k):
            return score + table[h, (q + 3 * b + k) % 32]

        def mask_mod(b, h, q, k):
            return (DOCUMENTS[b, q] == DOCUMENTS[b, k]) | (k < h)

        output = flash_attention(QUERY, KEY, VALUE, score_mod=score_mod, mask_mod=mask_mod, **placed)
        return jnp.sum(output * COTANGENT)

    want = jax.jit(jax.value_and_grad(loss))(TABLE)
    placed = {"mesh": mesh, "in_specs": (spec, keys, keys), "out_specs": spec}
    got = jax.jit(jax.value_and_grad(lambda table: loss(table, **placed)))(TABLE)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    np.testing.assert_allclose(got[1], want[1], **SMALL)


def test_gradients_of_narrow_tables_are_summed_in_float32():
    tokens = 96
    arrays = jax.random.normal(KEYS[0], (3, 1, tokens, 1, 8))

    def loss(table):
        def score_mod(score, b, h, q, k):
            return score + table[jnp.where(k > 2, 0, 1)]

        return jnp.sum(flash_attention(*arrays, score_mod=score_mod) * jnp.arange(8.0))

    wide, narrow = (jax.grad(loss)(jnp.zeros(2, dtype)) for dtype in (jnp.float32, jnp.bfloat16))
    assert narrow.dtype == jnp.bfloat16
    np.testing.assert_allclose(narrow.astype(jnp.float32), wide, rtol=2**-8)


def test_forward_mode_goes_through_functions():
    arrays, moved = (QUERY, KEY, VALUE, TABLE), (COTANGENT, VALUE, KEY, TABLE + 1)

    def of(attend):
        return lambda *arrays: attend(*arrays[:3], **FUNCTIONS["swin"](arrays[3]))

    with forward_mode():
        got = jax.jit(lambda *vs: jax.jvp(of(flash_attention), arrays, vs))(*moved)
        want = jax.jit(lambda *vs: jax.jvp(of(dense), arrays, vs))(*moved)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-4)


def test_arrays_with_explicit_axes_are_split_as_their_types_say():
    def call(query, key, value, ids):
        return flash_attention(query, key, value, mask_mod=lambda b, h, q, k: (ids[q] == ids[k]) | (h > 1))

    want = call(QUERY, KEY, VALUE, DOCUMENTS[0])
    mesh = jax.make_mesh((2,), ("dp",), (jax.sharding.AxisType.Explicit,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, jax.NamedSharding(mesh, P("dp"))) for x in (QUERY, KEY, VALUE)]
        got = jax.jit(call)(*placed, jax.device_put(DOCUMENTS[0], jax.NamedSharding(mesh, P())))
    np.testing.assert_allclose(got, want, **SMALL)


def test_constants_of_a_function_are_computed_under_explicit_axes():
    """A remainder has a sign of a constant, which is computed while the call is traced for its shards."""

    def call(query, key, value):
        return flash_attention(query, key, value, mask_mod=lambda b, h, q, k: (q + k + h + b) % 3 > 0)

    mesh = jax.make_mesh((2,), ("dp",), (jax.sharding.AxisType.Explicit,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        got = call(*(jax.device_put(x, jax.NamedSharding(mesh, P("dp"))) for x in (QUERY, KEY, VALUE)))
    np.testing.assert_allclose(got, call(QUERY, KEY, VALUE), **SMALL)


def test_a_batch_of_any_size_is_exported():
    def call(query, ids):
        return flash_attention(query, query, query, mask_mod=lambda b, h, q, k: ids[b, q] == ids[b, k])

    (b,) = jax.export.symbolic_shape("b")
    shapes = jax.ShapeDtypeStruct((b, *QUERY.shape[1:]), jnp.float32), jax.ShapeDtypeStruct((b, TOKENS), jnp.int32)
    exported = jax.export.export(jax.jit(call))(*shapes)
    np.testing.assert_allclose(exported.call(QUERY, DOCUMENTS), call(QUERY, DOCUMENTS), **SMALL)


def test_functions_that_are_written_again_are_compiled_once():
    def call(n):
        return flash_attention(QUERY, KEY, VALUE, score_mod=lambda s, b, h, q, k: s + n * TABLE[h, k % 32])

    first = call(1.0)
    programs = _compiled_function._cache_size()
    np.testing.assert_array_equal(call(1.0), first)
    assert _compiled_function._cache_size() == programs
    assert np.abs(call(2.0) - first).max() > 1e-2
    assert _compiled_function._cache_size() == programs + 1


def test_no_array_has_both_axes_of_tokens():
    tokens = 8192
    shape = jax.ShapeDtypeStruct((1, tokens, 1, 8), jnp.float32)
    ids, table = jax.ShapeDtypeStruct((1, tokens), jnp.int32), jax.ShapeDtypeStruct((257,), jnp.float32)

    def loss(query, key, value, table, ids):
        def score_mod(score, b, h, q, k):
            return score + table[128 + jnp.clip(k - q, -128, 128)]

        def mask_mod(b, h, q, k):
            return (ids[b, q] == ids[b, k]) & (k <= q)

        functions = {"score_mod": score_mod, "mask_mod": mask_mod}
        return jnp.sum(flash_attention(query, key, value, **functions, platform="xla"))

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3))).lower(shape, shape, shape, table, ids).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < tokens**2  # a quarter of a float32 array with both


@pytest.mark.parametrize("name", ["score_mod", "mask_mod"])
def test_kernels_without_functions_refuse_them_by_name(name):
    functions = {"score_mod": lambda s, b, h, q, k: s, "mask_mod": lambda b, h, q, k: k <= q}
    decision = ejkernel.explain(flash_attention, QUERY, KEY, VALUE, **{name: functions[name]})
    assert decision.forward.implementation.name == "xla"
    refused = [verdict for verdict in decision.forward.verdicts if verdict.implementation.name == "cudnn"]
    assert all(f"{name} is not handled" in verdict.reasons for verdict in refused)
    assert refused


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"score_mod": 3}, "score_mod: got int, wants a function"),
        ({"score_mod": lambda *_: "x"}, "score_mod: got a function that returns str, wants one scalar"),
        ({"score_mod": lambda *_: np.str_("x")}, "score_mod: got a function that returns str_, wants one scalar"),
        ({"score_mod": lambda *_: np.array("x")}, "score_mod: got a function that returns ndarray of <U1, wants one"),
        ({"score_mod": lambda s, q, k: s}, r"score_mod: got a function of \(s, q, k\), wants a function of \(score"),
        ({"score_mod": lambda s, *_: s > 0}, r"score_mod: got a function that returns bool\[\]"),
        ({"score_mod": lambda s, *_: (s, s)}, "score_mod: got a function with 2 results"),
        ({"score_mod": lambda s, *_: s + TABLE}, r"score_mod: got a function that returns float32\[4,32\]"),
        ({"mask_mod": lambda b, h, q, k: q - k}, r"mask_mod: got a function that returns int32\[\]"),
    ],
)
def test_functions_that_do_not_fit_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        flash_attention(QUERY, KEY, VALUE, **given)


def test_a_function_is_read_again_in_every_call():
    """The arrays and numbers that it closes over may have changed."""
    state = {"table": jnp.zeros(2), "limit": 1}

    def bias(score, b, h, q_idx, k_idx):
        return score + state["table"][h] * (k_idx % 3)

    def mask(b, h, q_idx, k_idx):
        return k_idx < state["limit"]

    x = jax.random.normal(jax.random.key(0), (1, 6, 2, 8))
    before = flash_attention(x, x, x, score_mod=bias, mask_mod=mask)
    np.testing.assert_allclose(before, jnp.broadcast_to(x[:, :1], x.shape), rtol=1e-6)
    state.update(table=jnp.array([0.5, -2.0]), limit=6)
    scores = jnp.einsum("bqhd,bkhd->bhqk", x, x) / 8**0.5 + state["table"][:, None, None] * (jnp.arange(6) % 3)
    expected = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), x)
    np.testing.assert_allclose(flash_attention(x, x, x, score_mod=bias, mask_mod=mask), expected, rtol=1e-5, atol=1e-6)


def test_a_function_may_return_a_python_number():
    x = jax.random.normal(jax.random.key(0), (1, 6, 2, 8))
    got = flash_attention(x, x, x, mask_mod=lambda b, h, q_idx, k_idx: True)
    np.testing.assert_array_equal(got, flash_attention(x, x, x, mask_mod=lambda b, h, q_idx, k_idx: q_idx >= 0))
    means = flash_attention(x, x, x, score_mod=lambda score, b, h, q_idx, k_idx: 0.0)
    np.testing.assert_allclose(means, jnp.broadcast_to(x.mean(1, keepdims=True), x.shape), rtol=1e-5, atol=1e-6)


def test_a_function_may_call_a_compiled_one_that_closes_over_arrays():
    """The array is one of the call's, as it is without the inner `jit`; kernels find no other."""
    x = jax.random.normal(jax.random.key(0), (1, 6, 4, 8))

    @jax.jit
    def slope(h):
        return SINKS[h, 0]

    def bias(score, b, h, q_idx, k_idx):
        return score + slope(h) * (k_idx - q_idx)

    (captured,) = score_function("score_mod", bias, jnp.float32).captured
    np.testing.assert_array_equal(captured, SINKS)
    want = flash_attention(x, x, x, score_mod=lambda score, b, h, q_idx, k_idx: score + SINKS[h, 0] * (k_idx - q_idx))
    np.testing.assert_array_equal(flash_attention(x, x, x, score_mod=bias), want)


@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
def test_a_factor_on_scores_that_a_bias_masks_has_a_gradient(twice):
    hidden = jax.random.bernoulli(jax.random.key(1), 0.4, (2, HEADS, TOKENS, TOKENS))
    bias, factors = jnp.where(hidden, -jnp.inf, 0.0), jnp.arange(1.0, 1 + HEADS)

    def gradient(factors, **masks):
        def loss(factors):
            output = flash_attention(QUERY, KEY, VALUE, score_mod=lambda s, b, h, q, k: s * factors[h], **masks)
            return jnp.sum(output * COTANGENT)

        with second_derivatives():
            derive = jax.grad(lambda factors: jax.grad(loss)(factors).sum()) if twice else jax.grad(loss)
            return derive(factors)

    want = gradient(factors, attention_mask=~hidden)
    assert np.abs(want).min() > 1e-2
    np.testing.assert_allclose(gradient(factors, bias=bias), want, rtol=1e-4, atol=1e-4)
