"""`ejgpu.flash_attn_varlen` against the loop: lengths that differ, empty sequences, slopes, biases, gradients."""

import functools

import ending_together
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ejkernel import ejgpu

# More queries than keys, fewer, none of one, of the other, of both; and a token behind the last sequence.
Q_LENGTHS, K_LENGTHS = (5, 2, 0, 3, 0, 1), (3, 6, 2, 0, 0, 4)
CU_Q, CU_K = (np.cumsum([0, *lengths]).astype(np.int32) for lengths in (Q_LENGTHS, K_LENGTHS))
CLOSE = {"rtol": 2e-5, "atol": 2e-5}


def arrays(heads: int = 4, kv_heads: int = 2, size: int = 12, value_size: int = 5) -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    shapes = ((CU_Q[-1] + 1, heads, size), (CU_K[-1] + 1, kv_heads, size), (CU_K[-1] + 1, kv_heads, value_size))
    return [generator.normal(size=shape).astype(np.float32) for shape in shapes]


def slopes(heads: int = 4) -> np.ndarray:
    return np.random.default_rng(1).uniform(0.1, 1, (len(Q_LENGTHS), heads)).astype(np.float32)


def bias(*shape: int) -> np.ndarray:
    return np.random.default_rng(2).normal(size=shape).astype(np.float32)


@functools.partial(jax.jit, static_argnames=("causal", "sm_scale", "dropout_p", "max_seqlens_q", "max_seqlens_k"))
def traced(q, k, v, cu_q, cu_k, **options):
    return ejgpu.flash_attn_varlen(q, k, v, layout="thd", cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **options)


BOUNDS = {"max_seqlens_q": 5, "max_seqlens_k": 6}
EXTRAS = {
    "plain": {},
    "scale": {"sm_scale": 0.3},
    "alibi": {"alibi_slopes": slopes()},
    "bias": {"b": bias(6, 4, 5, 6), **BOUNDS},
    "bias for all": {"b": bias(1, 1, 5, 6)},
    "bias and alibi": {"b": bias(1, 4, 5, 6), "alibi_slopes": slopes(), **BOUNDS},
}


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("extras", EXTRAS, ids=str)
def test_packed_sequences_match_a_loop(extras, causal):
    options = EXTRAS[extras] | ({} if causal or extras != "alibi" else BOUNDS)
    q, k, v = arrays()

    found = traced(q, k, v, CU_Q, CU_K, causal=causal, **options)

    want = ending_together.packed(
        q, k, v, CU_Q, CU_K, causal=causal, bias=options.get("b"), slopes=options.get("alibi_slopes"),
        scale=options.get("sm_scale"),
    )  # fmt: skip
    np.testing.assert_allclose(found, want, **CLOSE)
    assert not found[CU_Q[-1] :].any()


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 1), (8, 1), (3, 3)])
def test_query_heads_share_kv_heads(heads, kv_heads):
    q, k, v = arrays(heads, kv_heads)
    found = traced(q, k, v, CU_Q, CU_K, causal=True)
    np.testing.assert_allclose(found, ending_together.packed(q, k, v, CU_Q, CU_K), **CLOSE)


def test_one_vector_of_lengths_serves_queries_and_keys():
    q, k, v = np.random.default_rng(3).normal(size=(3, 9, 2, 8)).astype(np.float32)
    cu = jnp.array([0, 4, 4, 9])
    want = ending_together.packed(q, k, v, cu, cu, slopes=np.full((3, 2), 0.5))
    options = {"layout": "thd", "cu_seqlens_q": cu, "alibi_slopes": jnp.full((3, 2), 0.5)}
    for lengths in ({}, {"cu_seqlens_k": cu}, {"cu_seqlens_k": jnp.array(cu)}):
        np.testing.assert_allclose(ejgpu.flash_attn_varlen(q, k, v, **options, **lengths), want, **CLOSE)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize(("queries", "keys"), [(7, 4), (3, 8), (6, 6), (1, 63)])
def test_dense_rows_match_a_loop(queries, keys, causal):
    generator = np.random.default_rng(queries)
    q, k, v = (generator.normal(size=(2, n, h, 12)).astype(np.float32) for n, h in ((queries, 4), (keys, 2), (keys, 2)))
    extra, steep = bias(2, 4, queries, keys), slopes()[:2]
    want = [
        ending_together.attention(q[n], k[n], v[n], causal=causal, bias=extra[n], slopes=steep[n]) for n in range(2)
    ]
    options = {"causal": causal, "b": extra, "alibi_slopes": steep}

    found = ejgpu.flash_attn_varlen(q, k, v, layout="bshd", **options)
    heads_first = ejgpu.flash_attn_varlen(*(x.swapaxes(1, 2) for x in (q, k, v)), layout="bhsd", **options)

    np.testing.assert_allclose(found, want, **CLOSE)
    np.testing.assert_array_equal(heads_first.swapaxes(1, 2), found)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "slopes"])
def test_gradients_are_those_of_the_loop(name, causal):
    q, k, v = arrays(heads=2, kv_heads=1, size=3, value_size=2)
    every = {"q": q, "k": k, "v": v, "slopes": slopes(2)} | ({} if causal else {"bias": bias(1, 2, 5, 6)})
    if name not in every:
        every["bias"] = bias(1, 2, 5, 6)
    weight = np.random.default_rng(4).normal(size=(*q.shape[:2], 2))

    def want(x):
        given = every | {name: x}
        given.setdefault("bias", None)
        return ending_together.packed(
            given["q"], given["k"], given["v"], CU_Q, CU_K, causal=causal, bias=given["bias"], slopes=given["slopes"]
        )

    @jax.jit
    def loss(x, cu_q, cu_k):
        given = every | {name: x}
        options = {"b": given.get("bias"), "alibi_slopes": given["slopes"], "causal": causal, **BOUNDS}
        return jnp.sum(weight * traced(given["q"], given["k"], given["v"], cu_q, cu_k, **options))

    found = jax.grad(loss)(jnp.asarray(every[name]), CU_Q, CU_K)
    np.testing.assert_allclose(found, ending_together.gradient(want, every[name], weight), rtol=1e-4, atol=1e-4)


def test_dropout_takes_its_seed_from_the_call():
    q, k, v = arrays()
    dropped = jax.jit(lambda seed: traced(q, k, v, CU_Q, CU_K, causal=True, dropout_p=0.5, dropout_seed=seed))
    one, other = dropped(1), dropped(2)
    np.testing.assert_array_equal(one, dropped(1))
    assert (one != other).any()
    # Query 2 of the first sequence sees one key, which is kept and doubled, or dropped.
    for row, value in zip(np.asarray(one)[2], np.repeat(v[0], 2, axis=0), strict=True):
        assert not row.any() or np.allclose(row, 2 * value, **CLOSE)
    mean = np.mean([dropped(seed) for seed in range(200)], axis=0)
    np.testing.assert_allclose(mean, traced(q, k, v, CU_Q, CU_K, causal=True), atol=0.5)


@pytest.mark.filterwarnings("ignore:dropout_seed")
def test_no_seed_is_seed_0():
    one, other = (traced(*arrays(), CU_Q, CU_K, dropout_p=0.5, dropout_seed=seed) for seed in (None, 0))
    np.testing.assert_array_equal(one, other)


def test_vmap_over_packed_rows():
    q, k, v = (jnp.stack([x, 2 * x]) for x in arrays())
    cu_q, cu_k = jnp.stack([CU_Q, CU_Q.clip(max=5)]), jnp.stack([CU_K, CU_K.clip(max=4)])
    found = jax.jit(jax.vmap(lambda *given: traced(*given, causal=True)))(q, k, v, cu_q, cu_k)
    for row in range(2):
        want = ending_together.packed(*map(np.asarray, (q[row], k[row], v[row], cu_q[row], cu_k[row])))
        np.testing.assert_allclose(found[row], want, **CLOSE)


@pytest.mark.parametrize("options", [{}, {"alibi_slopes": jnp.ones((2, 2))}], ids=["plain", "alibi"])
def test_memory_is_linear_in_the_lengths(options):
    def temporary(tokens: int) -> int:
        x, cu = jax.ShapeDtypeStruct((tokens, 2, 16), jnp.float32), jax.ShapeDtypeStruct((3,), jnp.int32)

        def loss(q, k, v, cu_q, cu_k):
            return jnp.sum(traced(q, k, v, cu_q, cu_k, causal=True, **options) ** 2)

        compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(x, x, x, cu, cu).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(4096) < 2.5 * temporary(2048)


SPLITS = st.lists(st.integers(0, 9), min_size=3, max_size=3).map(sorted)


@settings(max_examples=10, deadline=None)
@given(SPLITS, SPLITS)
def test_random_lengths_match_a_loop(q_ends, k_ends):
    q, k, v = np.random.default_rng(6).normal(size=(3, 9, 2, 8)).astype(np.float32)
    cu_q, cu_k = (np.array([0, *ends], np.int32) for ends in (q_ends, k_ends))
    found = traced(q, k, v, cu_q, cu_k, causal=True)
    np.testing.assert_allclose(found, ending_together.packed(q, k, v, cu_q, cu_k), **CLOSE)


def test_checkpoint_and_export_keep_the_gradient():
    q, k, v = arrays()

    def loss(q, cu_q, cu_k):
        return jnp.sum(traced(q, k, v, cu_q, cu_k, causal=True, alibi_slopes=slopes()) ** 2)

    want = jax.jit(jax.grad(loss))(q, CU_Q, CU_K)
    exported = jax.export.export(jax.jit(jax.grad(jax.checkpoint(loss))))(q, CU_Q, CU_K)
    found = jax.export.deserialize(exported.serialize()).call(q, CU_Q, CU_K)
    np.testing.assert_allclose(found, want, **CLOSE)


def test_varlen_input_helper_makes_valid_inputs():
    q, k, v, metadata = ejgpu.varlen_input_helper(4, 4, 2, 32, 48, 16, dtype="float32")
    metadata.check_args(q, k, v)
    found = ejgpu.flash_attn_varlen(
        q, k, v, sm_scale=metadata.sm_scale, causal=True, layout=metadata.layout,
        cu_seqlens_q=metadata.cu_seqlens_q, cu_seqlens_k=metadata.cu_seqlens_k,
        max_seqlens_q=metadata.max_seqlens_q, max_seqlens_k=metadata.max_seqlens_k,
    )  # fmt: skip
    every = map(np.asarray, (q, k, v, metadata.cu_seqlens_q, metadata.cu_seqlens_k))
    np.testing.assert_allclose(found, ending_together.packed(*every), **CLOSE)


X, CU = jnp.ones((6, 2, 4)), jnp.array([0, 6])
TWO = jnp.array([0, 3, 6])
PACKED = {"layout": "thd", "cu_seqlens_q": CU}
WRONG = {
    "layout": ((X, X, X), {"layout": "htd"}, r"layout: got 'htd', wants one of 'thd', 'bshd', 'bhsd'"),
    "rank": ((X, X, X), {}, r"q: got shape \(6, 2, 4\), wants \[B, T, H, D\]"),
    "heads": ((X, X[:, :0], X[:, :0]), PACKED, r"k: got shape \(6, 0, 4\) with 0 heads, wants a divisor of q's 2"),
    "dtype": ((X, X.astype(jnp.bfloat16), X), PACKED, r"k: got dtype bfloat16, wants q's float32"),
    "no lengths": ((X, X, X), {"layout": "thd"}, r"cu_seqlens_q: got None with layout 'thd'"),
    "no lengths of keys": ((X, X[:5], X[:5]), PACKED, r"cu_seqlens_k: got None with q of shape"),
    "as many": ((X, X, X), {**PACKED, "cu_seqlens_k": TWO}, r"cu_seqlens_k: got shape \(3,\), wants"),
    "too long": ((X, X, X), {**PACKED, "cu_seqlens_k": jnp.array([0, 7])}, r"cu_seqlens_k: got \[0, 7\], wants"),
    "bound": ((X, X, X), {**PACKED, "max_seqlens_k": 5}, r"max_seqlens_k: got 5, wants at least 6"),
    "dense lengths": ((X[None],) * 3, {"cu_seqlens_q": CU}, r"cu_seqlens_q: got a value with layout 'bshd'"),
    "dense bound": ((X[None],) * 3, {"max_seqlens_q": 5}, r"max_seqlens_q: got 5, wants at least the 6 tokens"),
    "slopes": ((X, X, X), {**PACKED, "alibi_slopes": jnp.ones(2)}, r"alibi_slopes: got shape \(2,\), wants \[N=1, H="),
    "bias": ((X[None],) * 3, {"b": jnp.ones((1, 2, 6, 5))}, r"b: got shape \(1, 2, 6, 5\), wants \[N=1, H=2 or 1"),
    "narrow bias": ((X, X, X), {**PACKED, "b": jnp.ones((1, 2, 6, 5))}, r"b: got 5 along one axis, wants 6"),
    "probability": ((X, X, X), {**PACKED, "dropout_p": 1.0}, r"dropout_p: got 1"),
    "causal": ((X, X, X), {**PACKED, "causal": 1}, r"causal: got int 1, wants True or False"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(name):
    given, options, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        ejgpu.flash_attn_varlen(*given, **options)


def test_pair_terms_with_traced_lengths_need_max_seqlens():
    slopes = jnp.ones((1, 2))
    with pytest.raises(ValueError, match=r"max_seqlens_q: got None with a traced cu_seqlens_q, wants a bound"):
        jax.jit(lambda cu: traced(X, X, X, cu, cu, causal=False, alibi_slopes=slopes))(CU)
