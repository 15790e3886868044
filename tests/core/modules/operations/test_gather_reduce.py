"""`gather_reduce`: its meaning beside plain indexing, its gradients, its memory, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.modules import gather_reduce

TOKENS, EXPERTS, TOP_K, SIZE = 12, 5, 3, 8
PAIRS = TOKENS * TOP_K


def routed():
    """Sorted pairs, the place of each, and weights of a routing at random."""
    keys = jax.random.split(jax.random.key(0), 2)
    chosen = jnp.argsort(jax.random.uniform(keys[0], (TOKENS, EXPERTS)), axis=1)[:, :TOP_K]
    order = jnp.argsort(chosen.reshape(-1), stable=True)
    places = jnp.zeros_like(order).at[order].set(jnp.arange(PAIRS)).reshape(TOKENS, TOP_K)
    return order, places, jax.random.uniform(keys[1], (TOKENS, TOP_K))


def test_dispatch_and_combine_match_plain_indexing():
    order, places, weights = routed()
    tokens = jax.random.normal(jax.random.key(1), (TOKENS, SIZE))

    def ours(tokens, weights):
        rows = gather_reduce(tokens, order[:, None] // TOP_K, places)
        return gather_reduce(jnp.sin(rows), places, order[:, None], weights)

    def plain(tokens, weights):
        return jnp.einsum("tkd,tk->td", jnp.sin(tokens[order // TOP_K])[places], weights)

    np.testing.assert_allclose(ours(tokens, weights), plain(tokens, weights), rtol=1e-5, atol=1e-6)
    for argument in (0, 1):
        got, want = (jax.grad(lambda *x, f=f: jnp.sum(f(*x) ** 2), argument)(tokens, weights) for f in (ours, plain))
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_an_index_of_no_row_brings_in_nothing():
    rows = jnp.array([[1.0], [jnp.nan]])
    indices, inverse = jnp.array([[0, -1], [7, 0]]), jnp.array([[0, 3], [4, -1]])
    weights = jnp.array([[2.0, jnp.nan], [jnp.nan, 5.0]])
    output, pull = jax.vjp(lambda rows, weights: gather_reduce(rows, indices, inverse, weights), rows, weights)
    assert output.tolist() == [[2.0], [5.0]]
    of_rows, of_weights = pull(jnp.array([[10.0], [100.0]]))
    assert of_rows.tolist() == [[520.0], [0.0]]
    assert of_weights.tolist() == [[10.0, 0.0], [0.0, 100.0]]


def test_many_terms_per_token_match_a_loop():
    """More terms than are written out, with the same sums, and a program that does not grow with them."""
    rows = jax.random.normal(jax.random.key(0), (40, 4))
    indices = jnp.arange(40)[None]
    inverse = jnp.arange(40)[:, None]
    found = gather_reduce(rows, indices, inverse)
    np.testing.assert_allclose(found[0], rows.sum(axis=0), rtol=1e-5, atol=1e-5)
    assert "while" in jax.jit(gather_reduce).lower(rows, indices, inverse).as_text()


def test_no_array_holds_all_terms():
    """Neither combine nor the gradient of dispatch, which sums as many terms, holds them all."""
    tokens, count, size = 256, 8, 64
    pairs = jnp.arange(tokens * count).reshape(tokens, count)
    every, some = jnp.ones((tokens * count, size), jnp.bfloat16), jnp.ones((tokens, size), jnp.bfloat16)
    weights = jnp.ones((tokens, count))

    def combine(rows):
        return gather_reduce(rows, pairs, pairs.reshape(-1, 1), weights, platform="xla")

    def dispatched_back(rows, cotangent):
        _, pull = jax.vjp(lambda x: gather_reduce(x, pairs.reshape(-1, 1) // count, pairs, platform="xla"), rows)
        return pull(cotangent)

    for compiled in (
        jax.jit(combine).lower(every).compile(),
        jax.jit(dispatched_back).lower(some, every).compile(),
    ):
        assert compiled.memory_analysis().temp_size_in_bytes < every.size * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": jnp.ones(3)}, r"rows: got shape \(3,\), wants \[M, D\]"),
        ({"rows": jnp.ones((PAIRS, SIZE), jnp.int32)}, "rows: got dtype int32, wants a floating dtype"),
        ({"indices": jnp.ones((TOKENS, TOP_K))}, "indices: got dtype float32, wants an integer dtype"),
        ({"inverse": jnp.zeros((7, 1), jnp.int32)}, r"inverse: got .*wants"),
        ({"weights": jnp.ones((TOKENS, 2))}, r"weights: got shape \(12, 2\), wants \[T=12, K=3\]"),
        ({"inverse": jnp.roll(routed()[0], 1)[:, None]}, "inverse: got pair .* wants a pair of that row"),
        ({"inverse": routed()[0][:, None].at[4].set(PAIRS)}, "inverse: got pair .* 0 times, wants it once"),
        ({"inverse": jnp.repeat(routed()[0][:, None], 2, axis=1)}, "inverse: got pair .* 2 times, wants it once"),
    ],
)
def test_wrong_arguments_are_refused_by_name(changes, message):
    order, places, weights = routed()
    given = {"rows": jnp.ones((PAIRS, SIZE)), "indices": places, "inverse": order[:, None], "weights": weights}
    with pytest.raises(ValueError, match=message):
        gather_reduce(**(given | changes))
