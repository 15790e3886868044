"""The lightning indexer: which keys it selects, what its arguments mean, its memory and its gradients."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lightning_indexer_loop import lightning_indexer as loop

from ejkernel.modules import lightning_indexer
from ejkernel.modules.operations.configs import LightningIndexerConfig
from ejkernel.modules.operations.lightning_indexer import OP

CASES = {case.name: case for case in OP.cases if "ci" in case.tags}
SMALL = LightningIndexerConfig(block_q=5, block_k=8)


def arguments(name):
    """The arguments of a case, by name."""
    args = CASES[name].make(jax.random.key(0))
    return {f.name: x for f in dataclasses.fields(args) if (x := getattr(args, f.name)) is not None}


LOOP_CASES = (
    "packed, longer contexts, window",
    "padded rows, not causal",
    "equal scores",
    "more than there are",
    "pages of int8 keys",
    "blocks, not rectified",
    "blocks of packed sequences",
)
VARIANTS = {
    "pages of fp8 keys, window, blocks": (
        "pages of int8 keys",
        {"block_size": 3, "top_k": 2, "sliding_window": (7, 0), "cum_seqlens_q": jnp.array([0, 1, 3, 5])},
    ),
    "local blocks of absent pages": (
        "pages of int8 keys",
        {"block_size": 3, "local_blocks": 2, "top_k": 4, "kv_lens": jnp.array([14, 12, 1])},
    ),
    "two local blocks, padded rows": (
        "blocks, not rectified",
        {"local_blocks": 2, "cum_seqlens_q": jnp.array([0, 18, 27]), "cum_seqlens_k": jnp.array([0, 33, 44])},
    ),
    "queries of 8 bits": ("pages of int8 keys", {"query_scales": jnp.exp2(jnp.arange(24).reshape(3, 2, 4) % 5 - 2.0)}),
    "positions of compressed keys": ("equal scores", {"q_positions": ((jnp.arange(33) + 1) // 4 - 1)[None]}),
}


@pytest.mark.parametrize("name", [*LOOP_CASES, *VARIANTS])
def test_selects_what_a_loop_over_pairs_selects(name):
    """With tiles that divide neither queries nor keys; the scores of the cases are exact, and many are equal."""
    case, change = VARIANTS.get(name, (name, {}))
    given = arguments(case) | change
    if "fp8" in name:
        given["key"] = given["key"].astype(jnp.float8_e4m3fn)
    if "query_scales" in given:
        given["query"] = given["query"].astype(jnp.float8_e4m3fn)
    indices, scores = lightning_indexer(**given, cfg=SMALL)
    want = loop(**{name: np.asarray(x) if hasattr(x, "shape") else x for name, x in given.items()})
    np.testing.assert_array_equal(indices, want[0])
    np.testing.assert_array_equal(scores, want[1])


@pytest.fixture(scope="module")
def inputs():
    """Query, key and weights of which no two scores are alike."""
    q, k, w = jax.random.split(jax.random.key(1), 3)
    return jax.random.normal(q, (1, 20, 3, 8)), jax.random.normal(k, (1, 44, 8)), jax.random.normal(w, (1, 20, 3))


def test_random_scores_are_sorted_exactly(inputs):
    """The selection is that of a full sort of the scores in float64."""
    indices, scores = lightning_indexer(*inputs, top_k=11, cfg=SMALL)
    want = loop(*(np.asarray(x) for x in inputs), top_k=11, softmax_scale=8**-0.5)
    np.testing.assert_array_equal(indices, want[0])
    np.testing.assert_allclose(scores, want[1], rtol=1e-5, atol=1e-6)


def test_nan_comes_first_and_minus_zero_equals_zero():
    """Scores of a query: 1, NaN, -0, 0, -inf, inf, -NaN; equal ones in the order of their keys."""
    scores = jnp.array([1.0, jnp.nan, -0.0, 0.0, -jnp.inf, jnp.inf, -jnp.nan])
    # With weight -1 a score is -max(0, k), with weight 1 it is max(0, k): the two heads read a channel each.
    key = jnp.stack([jnp.where(scores < 0, 0, scores), jnp.where(scores < 0, -scores, 0)], axis=1)[None]
    indices, selected = lightning_indexer(
        jnp.eye(2)[None, None], jnp.nan_to_num(key, nan=jnp.nan, posinf=3e38), jnp.array([[[1.0, -1.0]]]), top_k=8
    )
    assert indices[0, 0].tolist() == [1, 6, 5, 0, 2, 3, 4, -1]
    np.testing.assert_array_equal(np.isnan(selected[0, 0]), [True, True, *[False] * 6])


def test_nan_comes_first_among_many_keys():
    """Also in loops of 8 numbers at a time, in which XLA's maximum for CPUs takes the larger of NaN and 0 as 0."""
    key = jax.random.normal(jax.random.key(2), (1, 256, 8)).at[:, 3::16].set(jnp.nan)
    indices, _ = lightning_indexer(jnp.ones((1, 8, 3, 8)), key, jnp.ones((1, 8, 3)), top_k=16, causal=False)
    np.testing.assert_array_equal(indices, jnp.broadcast_to(jnp.arange(3, 256, 16), indices.shape))


def test_nan_of_a_packed_sequence_stays_there(inputs):
    """Values and gradients of other sequences have the same bits."""
    bounds = {"cum_seqlens_q": jnp.array([0, 9, 20]), "cum_seqlens_k": jnp.array([0, 20, 44])}

    def run(query, key, weights):
        def loss(*arrays):
            scores = lightning_indexer(*arrays, **bounds, top_k=4)[1]
            return jnp.sum(jnp.where(jnp.isneginf(scores), 0, scores) ** 2), scores

        return jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(query, key, weights)

    query, key, weights = inputs
    (dquery, dkey, dweights), scores = run(*inputs)
    poisoned = (query.at[:, 9:].set(jnp.nan), key.at[:, 20:].set(jnp.nan), weights.at[:, 9:].set(jnp.inf))
    (nquery, nkey, nweights), nscores = run(*poisoned)
    pairs = ((dquery, nquery, 9), (dkey, nkey, 20), (dweights, nweights, 9), (scores, nscores, 9))
    for clean, other, end in pairs:
        np.testing.assert_array_equal(other[:, :end], clean[:, :end])


def test_a_query_with_nan_has_gradients_of_nan(inputs):
    """Its own, and those of the keys that it selects."""
    query, key, weights = inputs

    def loss(*arrays):
        return jnp.sum(lightning_indexer(*arrays, top_k=4, causal=False)[1] ** 2)

    dquery, dkey, _ = jax.grad(loss, argnums=(0, 1, 2))(query.at[:, 7].set(jnp.nan), key, weights)
    np.testing.assert_array_equal(np.isnan(dquery), (jnp.arange(20) == 7)[None, :, None, None] & jnp.ones((3, 8), bool))
    np.testing.assert_array_equal(np.isnan(dkey[:, :4]), True)
    np.testing.assert_array_equal(np.isnan(dkey[:, 4:]), False)


def test_float16_keeps_gradients_of_a_mean_over_many_tokens():
    """Of query and key, whose terms are below 2**-24 by themselves."""
    q, k = jax.random.split(jax.random.key(3))
    query, key = jax.random.normal(q, (1, 2048, 2, 4)), 64 * jax.random.normal(k, (1, 4, 4))

    def mean(*arrays):
        return jnp.mean(lightning_indexer(*arrays, jnp.full((1, 2048, 2), 2.0**-11), top_k=4, causal=False)[1])

    narrow = query.astype(jnp.float16), key.astype(jnp.float16)
    got, want = (jax.grad(mean, argnums=(0, 1))(*(x.astype(dtype) for x in narrow)) for dtype in ("float16", "float32"))
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x.astype(jnp.float32), y, atol=0.02 * jnp.max(jnp.abs(y)))


def test_the_gradient_of_a_block_is_that_of_the_key_that_was_largest():
    """(50 * 0.3) * 19/64 is above (19 * 0.3) * 50/64 in float32, and 50 * (0.3 * 19/64) is below."""
    key, scales = jnp.array([[[50, 0], [19, 1]]], jnp.int8), jnp.array([[19.0, 50.0]]) / 64
    options = {"top_k": 1, "block_size": 2, "softmax_scale": 0.3, "causal": False, "key_scales": scales}

    def score(query):
        return lightning_indexer(query, key, jnp.ones((1, 1, 1)), **options)[1].sum()

    gradient = jax.grad(score)(jnp.array([[[[1.0, 0.0]]]]))
    np.testing.assert_allclose(gradient[0, 0, 0], [50 * 0.3 * 19 / 64, 0], rtol=1e-6)


def test_a_query_without_keys_that_holds_nan_has_no_gradient(inputs):
    """Of 20 queries and 10 keys, the last query has the position of the last key, so the first 10 have no key."""
    query, key, weights = inputs

    def loss(query, weights):
        scores = lightning_indexer(query, key[:, :10], weights, top_k=4)[1]
        return jnp.sum(jnp.where(jnp.isneginf(scores), 0, scores))

    gradients = jax.grad(loss, argnums=(0, 1))(query.at[:, :10].set(jnp.nan), weights)
    jax.tree.map(lambda x: np.testing.assert_array_equal(x[:, :10], 0), gradients)


def test_gradients_are_those_of_all_scores_at_once(inputs):
    """The gradients of the selected entries of a dense array of scores, in float64, with rows of fewer keys."""
    scale, (query, key, weights) = 8**-0.5, inputs
    key = key[:, :20]
    indices = lightning_indexer(query, key, weights, top_k=6)[0]

    def dense(query, key, weights):
        products = jax.nn.relu(scale * jnp.einsum("bthd,bsd->bths", query, key, precision="highest"))
        scores = jnp.einsum("bth,bths->bts", weights, products, precision="highest")
        return jnp.sum(jnp.where(indices >= 0, jnp.take_along_axis(scores, jnp.maximum(indices, 0), axis=2), 0) ** 2)

    def sparse(query, key, weights):
        scores = lightning_indexer(query, key, weights, top_k=6, cfg=SMALL)[1]
        return jnp.sum(jnp.where(indices >= 0, scores, 0) ** 2)

    want = jax.grad(dense, argnums=(0, 1, 2))(query, key, weights)
    for got, right in zip(jax.grad(sparse, argnums=(0, 1, 2))(query, key, weights), want, strict=True):
        np.testing.assert_allclose(got, right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("over_pages", [False, True])
def test_gradients_of_blocks_are_those_of_their_largest_keys(over_pages, inputs):
    """Of query, keys and weights, without rectification; over pages with keys that are on no page."""
    query, key, weights = inputs
    key, scale = key[:, :20], 8**-0.5
    options = {"top_k": 4, "block_size": 3, "rectify": False, "cfg": SMALL}
    tables = jnp.array([[5, 1, 6, 0, 3]])  # pages of 4, 6 beyond the last
    present = jnp.repeat((tables < 6) | jnp.bool_(not over_pages), 4, axis=1)
    rows = tables.at[0, 2].set(2) if over_pages else jnp.arange(5)[None]
    pages = jnp.zeros((6, 4, 8)).at[rows[0]].set(key.reshape(5, 4, 8))
    selectable = (jnp.arange(20) <= jnp.arange(20)[:, None]) & present

    def dense(query, key, weights):
        products = scale * jnp.einsum("bthd,bsd->bths", query, key, precision="highest")
        scores = jnp.where(selectable, jnp.einsum("bth,bths->bts", weights, products, precision="highest"), -jnp.inf)
        blocks = jnp.pad(scores, ((0, 0), (0, 0), (0, 1)), constant_values=-jnp.inf).reshape(1, 20, 7, 3).max(axis=3)
        best = jax.lax.top_k(blocks, 4)[0]
        return jnp.sum(jnp.where(jnp.isneginf(best), 0, best) ** 2)

    def sparse(query, key, weights):
        more = {"block_tables": tables} if over_pages else {}
        scores = lightning_indexer(query, key, weights, **more, **options)[1]
        return jnp.sum(jnp.where(jnp.isneginf(scores), 0, scores) ** 2)

    got = jax.grad(sparse, argnums=(0, 1, 2))(query, pages if over_pages else key, weights)
    want = jax.grad(dense, argnums=(0, 1, 2))(query, key, weights)
    dkey = got[1][rows[0]].reshape(1, 20, 8) if over_pages else got[1]
    for x, y in zip((got[0], dkey, got[2]), want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


def test_blocks_of_packed_sequences_are_those_of_each_alone(inputs):
    """Their numbers, scores and gradients; with 9 and 11 queries of 21 and 23 keys, in blocks of 4."""
    bounds = {"cum_seqlens_q": jnp.array([0, 9, 20]), "cum_seqlens_k": jnp.array([0, 21, 44])}
    options = {"top_k": 3, "block_size": 4, "local_blocks": 1, "cfg": SMALL}

    def squares(*arrays, **bounds):
        indices, scores = lightning_indexer(*arrays, **bounds, **options)
        return jnp.sum(jnp.where(jnp.isfinite(scores), scores, 0) ** 2), indices

    def apart(query, key, weights):
        first = squares(query[:, :9], key[:, :21], weights[:, :9])
        last = squares(query[:, 9:], key[:, 21:], weights[:, 9:])
        return first[0] + last[0], jnp.concatenate([first[1], last[1]], axis=1)

    packed = jax.grad(lambda *arrays: squares(*arrays, **bounds), argnums=(0, 1, 2), has_aux=True)(*inputs)
    want = jax.grad(apart, argnums=(0, 1, 2), has_aux=True)(*inputs)
    np.testing.assert_array_equal(packed[1], want[1])
    for x, y in zip(packed[0], want[0], strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def test_keys_of_8_bits_are_constants_to_differentiation():
    """Queries and weights have the gradients that keys in float32, times their scales, give them; scales have none."""
    given = arguments("pages of int8 keys")
    wide = given["key"].astype(jnp.float32) * given["key_scales"][..., None]

    def loss(query, weights, key, scales):
        call = given | {"query": query, "weights": weights, "key": key, "key_scales": scales}
        scores = lightning_indexer(**call)[1]
        return jnp.sum(jnp.where(jnp.isneginf(scores), 0, scores) ** 2)

    scales = given["key_scales"]
    got = jax.grad(loss, argnums=(0, 1, 3))(given["query"], given["weights"], given["key"], scales)
    want = jax.grad(loss, argnums=(0, 1))(given["query"], given["weights"], wide, None)
    for x, y in zip(got, (*want, jnp.zeros_like(scales)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


def rounded(x, dtype, largest):
    """Values of 8 bits, and the scales that they were divided by, one per row of x."""
    scales = jnp.maximum(jnp.max(jnp.abs(x), axis=-1, keepdims=True), 1e-4) / largest
    scaled = x / scales
    return (jnp.round(scaled) if dtype == jnp.int8 else scaled).astype(dtype), scales[..., 0]


@pytest.mark.parametrize(("dtype", "largest"), [(jnp.int8, 127), (jnp.float8_e4m3fn, 448), (jnp.float8_e5m2, 57344)])
def test_queries_of_8_bits_with_scales_are_those_times_their_scales(dtype, largest):
    """The selection and the scores of float64 loops over the rounded numbers, for scales that are not powers of two."""
    q, k, w = jax.random.split(jax.random.key(4), 3)
    query, query_scales = rounded(jax.random.normal(q, (2, 9, 3, 32)), dtype, largest)
    key, key_scales = rounded(jax.random.normal(k, (2, 40, 32)), dtype, largest)
    weights = jax.random.normal(w, (2, 9, 3))
    scales = {"key_scales": key_scales, "query_scales": query_scales}
    indices, scores = jax.jit(lambda *x: lightning_indexer(*x, **scales, top_k=11, cfg=SMALL))(query, key, weights)
    wide = (
        np.asarray(x, np.float64) * np.asarray(y, np.float64)[..., None]
        for x, y in ((query, query_scales), (key, key_scales))
    )
    want = loop(*wide, np.asarray(weights), top_k=11, softmax_scale=32**-0.5)
    np.testing.assert_array_equal(indices, want[0])
    np.testing.assert_allclose(scores, want[1], rtol=1e-5, atol=1e-6)


def test_queries_of_8_bits_are_constants_to_differentiation():
    """Weights have the gradient that wide queries, times their scales, give them; queries and scales have none."""
    given = arguments("pages of int8 keys") | {"weights": jnp.ones((3, 2, 4), jnp.bfloat16)}
    query, scales = given["query"].astype(jnp.float8_e4m3fn), jnp.full((3, 2, 4), 0.3)

    def loss(weights, query, scales):
        scores = lightning_indexer(**given | {"query": query, "weights": weights, "query_scales": scales})[1]
        return jnp.sum(jnp.where(jnp.isneginf(scores), 0, scores) ** 2)

    got = jax.grad(loss, argnums=(0, 1, 2))(given["weights"], query, scales)
    want = jax.grad(loss)(given["weights"], given["query"] * 0.3, None)
    assert got[0].dtype == jnp.bfloat16
    np.testing.assert_allclose(*(x.astype(jnp.float32) for x in (got[0], want)), rtol=1e-2, atol=1e-5)
    for x in got[1:]:
        assert not jnp.any(x.astype(jnp.float32))


def test_a_decode_step_reads_tiles_of_pages():
    """It needs less memory than the keys of its requests."""
    shapes = {"query": (4, 1, 4, 32), "key": (2048, 16, 32), "weights": (4, 1, 4), "block_tables": (4, 512)}
    dtypes = {"key": jnp.int8, "block_tables": jnp.int32}
    arrays = {name: jax.ShapeDtypeStruct(x, dtypes.get(name, jnp.float32)) for name, x in shapes.items()}
    compiled = jax.jit(lambda arrays: lightning_indexer(**arrays, top_k=64)).lower(arrays).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * 512 * 16 * 32


def test_memory_is_linear_in_the_queries_and_keys():
    """Of both passes: four times the memory for four times the tokens, and less than an array [T, S] of bits."""

    def temporaries(tokens):
        shapes = ((1, tokens, 4, 32), (1, tokens, 32), (1, tokens, 4))
        arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]

        def loss(*arrays):
            indices, scores = lightning_indexer(*arrays, top_k=64)
            return jnp.sum(jnp.where(indices >= 0, scores, 0))

        compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*arrays).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    small, large = temporaries(8192), temporaries(32768)
    assert large < 4.5 * small
    assert large < 32768**2 / 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": 0}, r"top_k: got int 0, wants an int of at least 1"),
        ({"weights": jnp.ones((1, 20, 2))}, r"weights: got shape \(1, 20, 2\), wants \[B=1, T=20, H=3\]"),
        ({"key": jnp.ones((1, 44, 8), jnp.bfloat16)}, "key: got dtype bfloat16, wants query's float32"),
        ({"key": jnp.ones((1, 44, 1, 8))}, r"key: got shape \(1, 44, 1, 8\), wants \[B=1, S, D=8\]"),
        ({"cum_seqlens_q": jnp.array([0, 20])}, "cum_seqlens_k: got None with 20 queries and 44 keys"),
        ({"sliding_window": 0}, "sliding_window: got int 0"),
        (
            {"key_scales": jnp.ones((1, 44))},
            "key_scales: got an array with key of float32, wants None, or key of 8 bits",
        ),
        (
            {"query_scales": jnp.ones((1, 20, 3))},
            "query_scales: got an array with query of float32, wants None, or query",
        ),
        ({"query": jnp.ones((1, 20, 3, 8), jnp.int8)}, "key: got dtype float32, wants query's int8"),
        ({"query": jnp.ones((1, 20, 3, 8), jnp.int16)}, "query: got dtype int16, wants a floating dtype, or int8"),
        ({"local_blocks": 3}, "local_blocks: got 3, wants less than top_k=3"),
        ({"kv_lens": jnp.array([44])}, r"kv_lens: got shape \(1,\) with block_tables None, wants both or neither"),
        ({"block_tables": jnp.ones((2, 3), int)}, r"block_tables: got shape \(2, 3\), wants \[B=1, N\]"),
        (
            {"block_tables": jnp.zeros((1, 1), int), "cum_seqlens_q": jnp.array([0, 9, 20])},
            r"cum_seqlens_q: got shape \(3,\), wants \[B\+1=2\]",
        ),
    ],
)
def test_a_wrong_call_is_refused_by_name(inputs, change, message):
    names = dict(zip(("query", "key", "weights"), inputs, strict=True))
    with pytest.raises(ValueError, match=message):
        lightning_indexer(**names | {"top_k": 3} | change)
