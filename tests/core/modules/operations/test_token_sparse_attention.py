"""Token-sparse attention: what its lists mean, its memory and its gradients."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from token_sparse_loop import fp8_row
from token_sparse_loop import token_sparse_attention as loop

import ejkernel
from ejkernel.modules import flash_attention, lightning_indexer, token_sparse_attention
from ejkernel.modules.operations.configs import TokenSparseAttentionConfig
from ejkernel.modules.operations.token_sparse_attention import OP
from ejkernel.quantization import pack_fp8_latents, unpack_fp8_latents

CASES = {case.name: case for case in OP.cases if "ci" in case.tags}
SMALL = TokenSparseAttentionConfig(block_q=4)


@pytest.mark.parametrize(
    "name", ["lists by head, sinks", "latent", "empty lists", "pages, grouped heads", "pages of fp8 latents"]
)
def test_attends_as_a_loop_over_listed_keys(name):
    """In both forms, dense and over pages, with indices of no key, keys listed twice, and queries that list none."""
    args = CASES[name].make(jax.random.key(0))
    given = {f.name: getattr(args, f.name) for f in dataclasses.fields(args)}
    output, lse = token_sparse_attention(**given | {"return_lse": True}, cfg=SMALL)
    given.pop("return_lse")
    want, want_lse = loop(**{name: np.asarray(x) if hasattr(x, "shape") else x for name, x in given.items()})
    np.testing.assert_allclose(output, want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def inputs():
    """Query, key, value and a cotangent of 12 tokens."""
    keys = jax.random.split(jax.random.key(1), 4)
    shapes = ((1, 12, 4, 8), (1, 12, 2, 8), (1, 12, 2, 6), (1, 12, 4, 6))
    return tuple(jax.random.normal(k, shape) for k, shape in zip(keys, shapes, strict=True))


def test_all_keys_in_any_order_are_causal_attention(inputs):
    """Values and gradients of lists of all earlier keys, most of them reversed, are those of dense attention."""
    query, key, value, cotangent = inputs
    indices = (jnp.arange(12)[:, None] - jnp.arange(12))[None]

    def sparse(*arrays):
        return jnp.sum(cotangent * token_sparse_attention(*arrays, indices, cfg=SMALL))

    def dense(*arrays):
        return jnp.sum(cotangent * flash_attention(*arrays, causal=True))

    got = jax.value_and_grad(sparse, argnums=(0, 1, 2))(query, key, value)
    want = jax.value_and_grad(dense, argnums=(0, 1, 2))(query, key, value)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), got, want)


def test_a_key_listed_three_times_counts_three_times(inputs):
    """As three copies of the key do, whose gradients are summed."""
    query, key, value, cotangent = inputs
    listed = jnp.broadcast_to(jnp.array([5, 2, 5, 12, 7, 5]), (1, 12, 6))
    copied = jnp.broadcast_to(jnp.array([5, 2, 12, -1, 7, 13]), (1, 12, 6))

    def sparse(key, value):
        return jnp.sum(cotangent * token_sparse_attention(query, key, value, listed))

    def copies(key, value):
        key, value = (jnp.concatenate([x, x[:, 5:6], x[:, 5:6]], axis=1) for x in (key, value))
        return jnp.sum(cotangent * token_sparse_attention(query, key, value, copied))

    got = jax.value_and_grad(sparse, argnums=(0, 1))(key, value)
    want = jax.value_and_grad(copies, argnums=(0, 1))(key, value)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), got, want)


def test_keys_that_no_query_lists_are_not_read(inputs):
    """NaN there reaches neither output nor gradients."""
    query, key, value, cotangent = inputs
    indices = jnp.broadcast_to(jnp.array([0, -1, 3, 99]), (1, 12, 4))
    poisoned = [x.at[:, 4:].set(jnp.nan).at[:, 1].set(jnp.nan) for x in (key, value)]

    def loss(*arrays):
        return jnp.sum(cotangent * token_sparse_attention(*arrays, indices))

    value_and_grad = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))
    jax.tree.map(np.testing.assert_array_equal, value_and_grad(query, *poisoned), value_and_grad(query, key, value))


def test_unsigned_indices_of_8_bits_are_indices(inputs):
    """Also where there are more keys than such a number can name."""
    query, key, value, _ = inputs
    key, value = (jnp.pad(x, ((0, 0), (0, 300), (0, 0), (0, 0)), constant_values=jnp.nan) for x in (key, value))
    indices = jnp.broadcast_to(jnp.array([0, 3, 7], jnp.uint8), (1, 12, 3))
    got = token_sparse_attention(query, key, value, indices)
    want = token_sparse_attention(query, key, value, jnp.broadcast_to(jnp.array([0, 3, 7]), (1, 12, 3)))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "int8"])
def test_indices_of_any_integer_dtype_select_the_same_keys(dtype, inputs):
    query, key, value, _ = inputs
    indices = np.broadcast_to(np.array([0, 3, 7, np.iinfo(dtype).max]), (1, 12, 4))
    got = token_sparse_attention(query, key, value, jnp.asarray(indices.astype(dtype)))
    want = token_sparse_attention(query, key, value, jnp.where(jnp.arange(4) < 3, indices.astype(np.int32), -1))
    np.testing.assert_array_equal(got, want)


def test_nan_in_a_cotangent_of_a_query_without_keys_reaches_no_sink(inputs):
    query, key, value, cotangent = inputs
    indices = jnp.broadcast_to(jnp.array([0, 3, 7]), (1, 12, 3)).at[:, 5].set(-1)
    sinks = jnp.linspace(-1, 1, query.shape[2])

    def gradient(cotangent):
        output, pullback = jax.vjp(lambda x: token_sparse_attention(query, key, value, indices, x), sinks)
        return pullback(cotangent.astype(output.dtype))[0]

    np.testing.assert_array_equal(gradient(cotangent.at[:, 5].set(jnp.nan)), gradient(cotangent))


def test_memory_of_both_passes_is_linear_in_the_queries():
    """Indexer and attention together: four times the memory for four times the tokens."""

    def temporaries(tokens):
        shapes = ((1, tokens, 4, 32), (1, tokens, 1, 32), (1, tokens, 2, 16), (1, tokens, 16), (1, tokens, 2))
        arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]

        def loss(query, key, *indexer):
            indices, _ = lightning_indexer(*indexer, top_k=64)
            return jnp.sum(token_sparse_attention(query, key, None, indices, value_size=24, softmax_scale=0.2))

        compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*arrays).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    small, large = temporaries(8192), temporaries(32768)
    assert large < 4.5 * small
    assert large < 32768**2 / 8


@pytest.fixture(scope="module")
def paged():
    """A call over pages of grouped heads, by argument."""
    args = CASES["pages, grouped heads"].make(jax.random.key(0))
    return {f.name: x for f in dataclasses.fields(args) if (x := getattr(args, f.name)) is not None}


def test_gradients_over_pages_are_those_of_the_same_keys_in_rows(paged):
    """Of query, keys and values; two requests share a page, whose gradients are summed."""
    tables, tokens = paged["block_tables"], jnp.arange(16)
    has_page = jnp.repeat((tables >= 0) & (tables < 11), 4, axis=1)
    is_token = has_page & (tokens < paged["kv_lens"][:, None])
    indices = paged["indices"]
    listed = is_token[jnp.arange(3)[:, None, None], jnp.clip(indices, 0, 15)] & (indices >= 0) & (indices < 16)
    dense = {name: x for name, x in paged.items() if name not in ("block_tables", "kv_lens")}

    def over_pages(*arrays):
        return sum(jnp.sum(x) for x in token_sparse_attention(**paged | dict(zip(names, arrays, strict=True))))

    def over_rows(query, *pages):
        rows = (x.at[tables].get(mode="fill", fill_value=0).reshape(3, 16, *x.shape[2:]) for x in pages)
        call = dense | dict(zip(names, (query, *rows), strict=True)) | {"indices": jnp.where(listed, indices, -1)}
        return sum(jnp.sum(x) for x in token_sparse_attention(**call))

    names = ("query", "key", "value")
    got, want = (jax.grad(f, argnums=(0, 1, 2))(*(paged[n] for n in names)) for f in (over_pages, over_rows))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), got, want)


def test_no_cache_is_copied():
    """A decode step over pages of several KV heads, and of fp8 latents, needs memory for its listed keys only."""

    def temporaries(key, query, **options):
        def step(query, key, indices, tables):
            value = None if options else key
            return token_sparse_attention(query, key, value, indices, block_tables=tables, **options)

        arrays = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((4, 1, 8), (4, 64))]
        return jax.jit(step).lower(query, key, *arrays).compile().memory_analysis().temp_size_in_bytes

    grouped = jax.ShapeDtypeStruct((512, 16, 4, 32), jnp.float32), jax.ShapeDtypeStruct((4, 1, 8, 32), jnp.float32)
    assert temporaries(*grouped) < 2**20  # the keys are 2**22 bytes
    latent = jax.ShapeDtypeStruct((2048, 16, 1, 148), jnp.uint8), jax.ShapeDtypeStruct((4, 1, 8, 136), jnp.bfloat16)
    assert temporaries(*latent, key_format="fp8_latents", value_size=128, softmax_scale=0.1) < 2**20


def test_rows_of_656_bytes_hold_what_was_packed():
    """512 channels of e4m3 with a scale per 128, and 64 of bfloat16; with zeros, and one channel above all others."""
    latents = jax.random.normal(jax.random.key(0), (5, 576)).at[0, :128].set(0).at[1, 3].set(1e4)
    rows = pack_fp8_latents(latents, 512)
    assert rows.shape == (5, 656)
    assert np.all(np.isfinite(unpack_fp8_latents(pack_fp8_latents(1e-36 * latents, 512), 512)))
    assert rows.dtype == jnp.uint8
    got = unpack_fp8_latents(rows, 512)
    np.testing.assert_array_equal(got[:, 512:], latents[:, 512:].astype(jnp.bfloat16).astype(jnp.float32))
    np.testing.assert_allclose(got, [fp8_row(row, 512) for row in np.asarray(rows)], rtol=1e-6)
    groups = latents[:, :512].reshape(5, 4, 128)
    half_subnormal = jnp.max(jnp.abs(groups), axis=-1, keepdims=True) / 448 * 2.0**-10
    error = jnp.abs(got[:, :512].reshape(groups.shape) - groups)
    assert jnp.all(error <= 1.001 * jnp.maximum(jnp.abs(groups) / 16, half_subnormal))


def test_triton_refuses_the_format_of_keys_by_name(paged):
    """It does not refuse pages of numbers for what they are: their queries are one row."""
    latents = CASES["pages of fp8 latents"].make(jax.random.key(0))
    call = {f.name: getattr(latents, f.name) for f in dataclasses.fields(latents)}
    for arguments, is_refused in ((call, True), (paged, False)):
        verdicts = ejkernel.explain(token_sparse_attention, **arguments).forward.verdicts
        (triton,) = (v for v in verdicts if v.implementation.platform == "triton")
        assert ("key_format is not handled" in triton.reasons) is is_refused
        assert not any("block_tables" in reason or "kv_lens" in reason for reason in triton.reasons)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_lens": jnp.ones((2,), int)}, r"kv_lens: got shape \(2,\), wants \[B=3\]"),
        ({"block_tables": None}, r"key: got shape \(11, 4, 2, 24\), wants \[B=3, S, Hk, D=24\]"),
        ({"block_tables": jnp.ones((2, 4), int)}, r"block_tables: got shape \(2, 4\), wants \[B=3, N\]"),
        ({"key_format": "fp8"}, "key_format: got str 'fp8', wants one of None, 'fp8_latents'"),
        ({"key_format": "fp8_latents"}, "value: got shape .* wants None with key_format='fp8_latents'"),
        (
            {"key_format": "fp8_latents", "value": None, "value_size": 16, "softmax_scale": 1.0},
            "value_size: got 16, wants a multiple of 128 with key_format='fp8_latents'",
        ),
        (
            {"query": jnp.zeros((3, 3, 4, 136)), "value": None, "value_size": 128, "softmax_scale": 1.0}
            | {"key_format": "fp8_latents"},
            "key: got float32.* wants 148 bytes per row, uint8 or float8_e4m3fn, for 128 \\+ 8 channels",
        ),
    ],
)
def test_a_wrong_call_over_pages_is_refused_by_name(paged, change, message):
    with pytest.raises(ValueError, match=message):
        token_sparse_attention(**paged | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_lens": jnp.ones(1, int)}, r"kv_lens: got shape \(1,\) with block_tables None, wants both or neither"),
        ({"value": None}, "value_size: got None with value None, wants how many leading entries of key are its value"),
        ({"value": None, "value_size": 9}, "value_size: got 9, wants at most the 8 entries of key"),
        ({"value": None, "value_size": 8}, "softmax_scale: got None with value None, wants a number: the default, 8"),
        ({"value_size": 4}, "value_size: got 4 with an array as value"),
        ({"indices": jnp.zeros((1, 12, 3, 4), int)}, r"indices: got shape \(1, 12, 3, 4\), wants \[B=1, T=12, Hk=2"),
        ({"indices": jnp.zeros((1, 12, 4))}, "indices: got dtype float32, wants an integer dtype"),
        ({"query": jnp.zeros((1, 12, 3, 8))}, "key: got shape .* with 2 heads, wants a divisor of query's 3"),
        ({"softmax_aux": jnp.zeros((2, 3, 4))}, "softmax_aux: got shape"),
    ],
)
def test_a_wrong_call_is_refused_by_name(inputs, change, message):
    names = dict(zip(("query", "key", "value"), inputs[:3], strict=True)) | {"indices": jnp.zeros((1, 12, 4), int)}
    with pytest.raises(ValueError, match=message):
        token_sparse_attention(**names | change)
