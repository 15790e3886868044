"""Token-sparse attention: what its lists mean, its memory and its gradients."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from token_sparse_loop import token_sparse_attention as loop

from ejkernel.modules import flash_attention, lightning_indexer, token_sparse_attention
from ejkernel.modules.operations.configs import TokenSparseAttentionConfig
from ejkernel.modules.operations.token_sparse_attention import OP

CASES = {case.name: case for case in OP.cases if "ci" in case.tags}
SMALL = TokenSparseAttentionConfig(block_q=4)


@pytest.mark.parametrize("name", ["lists by head, sinks", "latent", "empty lists"])
def test_attends_as_a_loop_over_listed_keys(name):
    """In both forms, with indices of no key, keys listed twice, and queries that list none."""
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"value": None}, "value_size: got None with value None, wants how many leading entries of key are its value"),
        ({"value": None, "value_size": 9}, "value_size: got 9, wants at most the 8 entries of key"),
        ({"value": None, "value_size": 8}, "softmax_scale: got None with value None, wants a scale: 8 is the size of"),
        ({"value_size": 4}, "value_size: got 4 with a value, wants one of the two"),
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
