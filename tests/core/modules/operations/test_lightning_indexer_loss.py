"""The indexer's loss: its value, its gradient, and that an indexer can be trained with it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.modules import lightning_indexer, lightning_indexer_loss
from ejkernel.modules.operations.lightning_indexer_loss import OP

CASES = {case.name: case for case in OP.cases if "ci" in case.tags}


def loop(query, key, indices, scores):
    """`lightning_indexer_loss`, query by query in float64."""
    (rows, tokens, heads, size), (_, keys, kv_heads, _) = query.shape, key.shape
    losses = np.zeros((rows, tokens))
    for b, t in np.ndindex(rows, tokens):
        entries = [n for n, j in enumerate(indices[b, t]) if 0 <= j < keys]
        if not entries:
            continue
        target = np.zeros(len(entries))
        for h in range(heads):
            listed = key[b, indices[b, t, entries], h // (heads // kv_heads)].astype(np.float64)
            weights = np.exp(listed @ query[b, t, h].astype(np.float64) * size**-0.5)
            target += weights / weights.sum() / heads
        share = np.exp(scores[b, t, entries].astype(np.float64))
        losses[b, t] = np.sum(target * np.log(target / (share / share.sum())))
    return losses


@pytest.mark.parametrize("name", ["grouped heads", "empty lists"])
def test_the_divergence_matches_a_loop_over_queries(name):
    args = CASES[name].make(jax.random.key(0))
    arrays = (args.query, args.key, args.indices, args.scores)
    got = lightning_indexer_loss(*arrays)
    np.testing.assert_allclose(got, loop(*(np.asarray(x) for x in arrays)), rtol=1e-4, atol=1e-6)


def test_training_on_the_loss_halves_the_divergence():
    """By gradient descent on the keys of an indexer that has attention's queries."""
    q, k, i = jax.random.split(jax.random.key(1), 3)
    query, key = 2 * jax.random.normal(q, (1, 24, 2, 8)), jax.random.normal(k, (1, 24, 1, 8))
    weights = jnp.ones((1, 24, 2))

    def loss(key_index):
        indices, scores = lightning_indexer(query, key_index, weights, top_k=24)
        return lightning_indexer_loss(query, key, indices, scores).mean()

    @jax.jit
    def train(key_index):
        return jax.lax.fori_loop(0, 60, lambda _, x: x - 3.0 * jax.grad(loss)(x), key_index)

    start = 0.3 * jax.random.normal(i, (1, 24, 8))
    end = train(start)
    assert loss(end) < 0.5 * loss(start)


def test_attention_is_constant_to_the_gradient_of_the_loss():
    args = CASES["grouped heads"].make(jax.random.key(0))

    def loss(query, key, scores):
        return lightning_indexer_loss(query, key, args.indices, scores).sum()

    dquery, dkey, dscores = jax.grad(loss, argnums=(0, 1, 2))(args.query, args.key, args.scores)
    assert not np.any(dquery)
    assert not np.any(dkey)
    assert np.any(dscores)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scores": jnp.ones((2, 21, 8))}, r"scores: got shape \(2, 21, 8\), wants \[B=2, T=21, K=9\]"),
        ({"indices": jnp.ones((2, 21, 9))}, "indices: got dtype float32, wants an integer dtype"),
        ({"key": jnp.ones((2, 40, 3, 24))}, "key: got shape .* with 3 heads, wants a divisor of query's 4"),
    ],
)
def test_a_wrong_call_is_refused_by_name(change, message):
    args = CASES["grouped heads"].make(jax.random.key(0))
    given = {name: getattr(args, name) for name in ("query", "key", "indices", "scores")}
    with pytest.raises(ValueError, match=message):
        lightning_indexer_loss(**given | change)
