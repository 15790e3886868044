"""The dense loss of an indexer: its value, its gradients and its memory."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lightning_indexer_loop import sequences

from ejkernel.modules import lightning_indexer, lightning_indexer_dense_loss, lightning_indexer_loss
from ejkernel.modules.operations.configs import LightningIndexerDenseLossConfig
from ejkernel.modules.operations.lightning_indexer_dense_loss import OP

CASES = {case.name: case for case in OP.cases if "ci" in case.tags}
INDEXER = ("query_index", "key_index", "index_weights")
SMALL = LightningIndexerDenseLossConfig(block_q=4, block_k=8)


def arguments(name):
    """The arguments of a case, by name."""
    args = CASES[name].make(jax.random.key(0))
    return {f.name: x for f in dataclasses.fields(args) if (x := getattr(args, f.name)) is not None}


def loop(query, key, query_index, key_index, index_weights, causal=True, sliding_window=None, **lengths):
    """`lightning_indexer_dense_loss`, query by query in float64."""
    wide = [x.astype(np.float64) for x in (query, key, query_index, key_index, index_weights)]
    query, key, query_index, key_index, index_weights = wide
    (rows, tokens, heads, size), (_, keys, kv_heads, _) = query.shape, key.shape
    losses = np.zeros((rows, tokens))
    for (b, t), (own, position) in sequences(rows, tokens, keys, **lengths).items():
        left = keys if sliding_window is None else sliding_window[0]
        attended = [s for at, s in enumerate(own) if not (causal and at > position) and position - at <= left]
        if not attended:
            continue
        target, scores = np.zeros(len(attended)), np.zeros(len(attended))
        for h in range(heads):
            weights = np.exp(key[b, attended, h // (heads // kv_heads)] @ query[b, t, h] * size**-0.5)
            target += weights / weights.sum() / heads
        for j in range(query_index.shape[2]):
            products = key_index[b, attended] @ query_index[b, t, j] * query_index.shape[3] ** -0.5
            scores += index_weights[b, t, j] * np.maximum(products, 0)
        share = np.exp(scores)
        losses[b, t] = np.sum(target * np.log(target / (share / share.sum())))
    return losses


@pytest.mark.parametrize("name", ["longer context", "packed, window", "padded rows, bfloat16, not causal"])
def test_the_divergence_matches_a_loop_over_queries(name):
    """With tiles that divide neither queries nor keys."""
    given = arguments(name)
    got = lightning_indexer_dense_loss(**given, cfg=SMALL)
    want = loop(**{name: np.asarray(x) if hasattr(x, "shape") else x for name, x in given.items()})
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-5)


def test_losses_and_gradients_are_those_of_selecting_every_key():
    """The sparse loss over the keys that `lightning_indexer` selects with `top_k` of all keys."""
    given = arguments("longer context")
    attention, indexer = (
        (given["query"], given["key"]),
        [given[n] for n in ("query_index", "key_index", "index_weights")],
    )
    cotangent = jax.random.normal(jax.random.key(1), given["query"].shape[:2])

    def dense(*indexer):
        losses = lightning_indexer_dense_loss(*attention, *indexer, cfg=SMALL)
        return jnp.sum(losses * cotangent), losses

    def selected(*indexer):
        losses = lightning_indexer_loss(*attention, *lightning_indexer(*indexer, top_k=given["key"].shape[1]))
        return jnp.sum(losses * cotangent), losses

    got, want = (jax.grad(f, argnums=(0, 1, 2), has_aux=True)(*indexer) for f in (dense, selected))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), got, want)


def test_nan_of_padding_and_of_other_sequences_stays_there():
    """Losses and gradients of the first packed sequence have the same bits."""
    given = arguments("packed, window")
    names = ("query", "key", *INDEXER)

    @jax.jit
    def run(arrays):
        def loss(*indexer):
            call = given | dict(zip(names, (*arrays[:2], *indexer), strict=True))
            losses = lightning_indexer_dense_loss(**call, cfg=SMALL)
            return jnp.sum(losses), losses

        return jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(*arrays[2:])

    clean = tuple(given[name] for name in names)
    ends = (9, 12, 9, 12, 9)
    poisoned = tuple(x.at[:, end:].set(jnp.nan) for x, end in zip(clean, ends, strict=True))
    (want, losses), (got, poisoned_losses) = run(clean), run(poisoned)
    np.testing.assert_array_equal(poisoned_losses[:, :9], losses[:, :9])
    for x, y, end in zip(got, want, ends[2:], strict=True):
        np.testing.assert_array_equal(x[:, :end], y[:, :end])


def test_a_query_with_nan_has_a_gradient_of_nan():
    given = arguments("longer context")
    query = given.pop("query_index").at[:, 5].set(jnp.nan)
    gradient = jax.grad(lambda x: lightning_indexer_dense_loss(query_index=x, **given, cfg=SMALL).sum())(query)
    np.testing.assert_array_equal(np.isnan(gradient[:, 5]), True)
    np.testing.assert_array_equal(np.isnan(gradient[:, 6:]), False)


def test_float16_keeps_gradients_of_a_mean_over_many_tokens():
    """Of the indexer's query and key, whose terms are below 2**-24 by themselves."""
    keys = jax.random.split(jax.random.key(3), 4)
    shapes = ((1, 2048, 1, 4), (1, 4, 1, 4), (1, 2048, 2, 4), (1, 4, 4))
    *attention, query, key = (jax.random.normal(k, shape) for k, shape in zip(keys, shapes, strict=True))
    weights = jnp.full((1, 2048, 2), 2.0**-11)

    def mean(*arrays):
        return jnp.mean(lightning_indexer_dense_loss(*attention, *arrays, weights, causal=False))

    narrow = query.astype(jnp.float16), (64 * key).astype(jnp.float16)
    got, want = (jax.grad(mean, argnums=(0, 1))(*(x.astype(dtype) for x in narrow)) for dtype in ("float16", "float32"))
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x.astype(jnp.float32), y, atol=0.02 * jnp.max(jnp.abs(y)))


def test_attention_is_constant_to_the_gradient_of_the_loss():
    given = arguments("longer context")

    def loss(query, key):
        return lightning_indexer_dense_loss(**given | {"query": query, "key": key}).sum()

    for gradient in jax.grad(loss, argnums=(0, 1))(given["query"], given["key"]):
        np.testing.assert_array_equal(gradient, 0)


def test_memory_of_both_passes_is_linear_in_the_queries_and_keys():
    """Four times the memory for four times the tokens, and less than an array [T, S] of bits."""

    def temporaries(tokens):
        shapes = ((1, tokens, 4, 32), (1, tokens, 1, 32), (1, tokens, 2, 16), (1, tokens, 16), (1, tokens, 2))
        arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]

        def loss(query, key, *indexer):
            return lightning_indexer_dense_loss(query, key, *indexer).sum()

        compiled = jax.jit(jax.grad(loss, argnums=(2, 3, 4))).lower(*arrays).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    small, large = temporaries(8192), temporaries(32768)
    assert large < 4.5 * small
    assert large < 32768**2 / 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key_index": jnp.ones((2, 39, 16))}, r"key_index: got shape \(2, 39, 16\), wants \[B=2, S=40, Di=16\]"),
        ({"query": jnp.ones((2, 21, 3, 24))}, "key: got shape .* with 2 heads, wants a divisor of query's 3"),
        ({"key_index": jnp.ones((2, 40, 16), jnp.bfloat16)}, "key_index: got dtype bfloat16, wants query_index's"),
        ({"cum_seqlens_q": jnp.array([0, 21, 42])}, "cum_seqlens_k: got None with 21 queries and 40 keys"),
    ],
)
def test_a_wrong_call_is_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        lightning_indexer_dense_loss(**arguments("longer context") | change)
