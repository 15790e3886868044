"""`expert_routing`: its meaning beside NumPy, inside a layer that is differentiated, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.modules import expert_routing, gather_reduce

TOKENS, EXPERTS, TOP_K = 29, 6, 3


def logits_of(seed=0):
    return jax.random.normal(jax.random.key(seed), (TOKENS, EXPERTS))


def test_rows_are_sorted_by_expert():
    experts, places, order, sizes = map(np.asarray, expert_routing(logits_of(), TOP_K))
    want = np.argsort(-np.asarray(logits_of()), axis=1, kind="stable")[:, :TOP_K]
    assert (experts == want).all()
    of_rows = want.reshape(-1)[order]
    assert (np.diff(of_rows) >= 0).all()
    assert (np.diff(order)[np.diff(of_rows) == 0] > 0).all(), "the order is stable"
    assert (order[places.reshape(-1)] == np.arange(TOKENS * TOP_K)).all()
    assert sizes.tolist() == np.bincount(want.reshape(-1), minlength=EXPERTS).tolist()


def test_a_masked_expert_is_the_last_choice_and_nan_the_first():
    logits = logits_of().at[:, 2].set(-jnp.inf).at[0, 4].set(jnp.nan)
    experts = expert_routing(logits, EXPERTS)[0]
    assert (experts[:, -1] == 2).all()
    assert experts[0, 0] == 4


def test_a_layer_around_it_is_differentiated():
    tokens = jax.random.normal(jax.random.key(1), (TOKENS, 4))

    def loss(router, dense):
        logits = tokens @ router
        experts, places, order, _ = expert_routing(logits, TOP_K)
        weights = jax.nn.softmax(jnp.take_along_axis(logits, experts, axis=1))
        if dense:
            return jnp.sum(jnp.sin(tokens[:, None] * (1.0 + experts[..., None]) * weights[..., None]))
        rows = gather_reduce(tokens, order[:, None] // TOP_K, places)
        spread = gather_reduce(rows, places.reshape(-1, 1), order[:, None]).reshape(TOKENS, TOP_K, 4)
        return jnp.sum(jnp.sin(spread * (1.0 + experts[..., None]) * weights[..., None]))

    router = jax.random.normal(jax.random.key(2), (4, EXPERTS))
    got, want = (jax.grad(loss)(router, dense) for dense in (False, True))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    assert jnp.any(want != 0)


def test_a_call_without_tokens_has_no_sorted_rows():
    experts, places, order, sizes = expert_routing(jnp.zeros((0, EXPERTS)), 2)
    assert experts.shape == places.shape == (0, 2)
    assert order.shape == (0,)
    assert sizes.tolist() == [0] * EXPERTS


@pytest.mark.parametrize("wrong", [0, EXPERTS + 1, 1.5])
def test_a_number_of_experts_that_is_none_is_refused(wrong):
    with pytest.raises(ValueError, match="top_k"):
        expert_routing(logits_of(), wrong)


def test_logits_that_are_no_matrix_are_refused():
    with pytest.raises(ValueError, match="logits"):
        expert_routing(logits_of()[0], 1)
    with pytest.raises(ValueError, match="logits"):
        expert_routing(logits_of().astype(jnp.int32), 1)
