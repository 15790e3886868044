"""Scores, selection biases, groups and weights of `expert_routing`, against a loop over tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.modules import expert_routing

TOKENS, EXPERTS = 33, 12
DEEPSEEK = {"scores": "sigmoid", "n_groups": 4, "top_groups": 2, "normalise": True, "scale": 2.5}


def inputs() -> tuple[jax.Array, jax.Array]:
    """Logits and a selection bias."""
    logits, bias = jax.random.split(jax.random.key(0))
    return 2 * jax.random.normal(logits, (TOKENS, EXPERTS)), 0.4 * jax.random.normal(bias, (EXPERTS,))


def routed(logits, bias, top_k, scores, n_groups=1, top_groups=1, of_group=2, normalise=False, scale=1.0):
    """The experts of one token and their weights, from the definition, in float64."""
    logits = np.asarray(logits, np.float64)
    score = 1 / (1 + np.exp(-logits)) if scores == "sigmoid" else np.exp(logits) / np.exp(logits).sum()
    biased, size = score + bias, len(logits) // n_groups
    strength = [sorted(biased[g * size : (g + 1) * size])[-of_group:] for g in range(n_groups)]
    best = sorted(range(n_groups), key=lambda g: -sum(strength[g]))[:top_groups]
    open_experts = [e for e in range(len(logits)) if e // size in best]
    experts = sorted(open_experts, key=lambda e: -biased[e])[:top_k]
    weights = score[experts]
    return experts, scale * (weights / weights.sum() if normalise else weights)


@pytest.mark.parametrize(
    "options",
    [
        {"scores": "softmax"},
        {"scores": "softmax", "normalise": True},
        {"scores": "sigmoid", "scale": 1.5},
        DEEPSEEK,
        {"scores": "softmax", "n_groups": 3, "top_groups": 1, "group_score_experts": 1},
    ],
)
@pytest.mark.parametrize("biased", [False, True])
def test_experts_and_weights_are_those_of_the_definition(options: dict, biased: bool) -> None:
    logits, bias = inputs()
    given = {"selection_bias": bias} if biased else {}
    experts, _, _, sizes, weights = jax.jit(lambda x: expert_routing(x, 3, **options, **given))(logits)
    loop = {{"group_score_experts": "of_group"}.get(name, name): value for name, value in options.items()}
    for token in range(TOKENS):
        want, strength = routed(logits[token], np.asarray(bias) if biased else 0.0, 3, **loop)
        assert experts[token].tolist() == want
        np.testing.assert_allclose(weights[token], strength, rtol=1e-5)
    np.testing.assert_array_equal(sizes, np.bincount(np.ravel(experts), minlength=EXPERTS))


def test_weights_have_the_gradient_of_their_formula() -> None:
    logits, bias = inputs()

    def in_call(logits: jax.Array, bias: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(expert_routing(logits, 3, selection_bias=bias, **DEEPSEEK)[4] * jnp.arange(3)))

    experts = expert_routing(logits, 3, selection_bias=bias, **DEEPSEEK)[0]

    def formula(logits: jax.Array) -> jax.Array:
        chosen = jnp.take_along_axis(jax.nn.sigmoid(logits), experts, axis=1)
        return jnp.sum(jnp.sin(2.5 * chosen / chosen.sum(-1, keepdims=True) * jnp.arange(3)))

    of_logits, of_bias = jax.grad(in_call, argnums=(0, 1))(logits, bias)
    np.testing.assert_allclose(of_logits, jax.grad(formula)(logits), rtol=1e-5, atol=1e-6)
    assert np.any(of_logits)
    assert not np.any(of_bias)


def test_a_call_without_scores_returns_integers_alone() -> None:
    assert [x.dtype.name for x in expert_routing(inputs()[0], 2)] == ["int32"] * 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"normalise": True}, "normalise: got bool True without scores"),
        ({"selection_bias": jnp.zeros(12)}, "selection_bias: got .* without scores"),
        ({"scores": "tanh"}, "scores: got str 'tanh', wants one of 'softmax', 'sigmoid'"),
        ({"scores": "sigmoid", "selection_bias": jnp.zeros(3)}, r"selection_bias: got shape \(3,\)"),
        ({"scores": "sigmoid", "n_groups": 5, "top_groups": 2}, "n_groups: got 5, wants a divisor of the 12 experts"),
        ({"scores": "sigmoid", "n_groups": 4}, "top_groups: got None with n_groups=4"),
        ({"scores": "sigmoid", "n_groups": 4, "top_groups": 5}, "top_groups: got 5, wants at most the 4 groups"),
        ({"scores": "sigmoid", "n_groups": 12, "top_groups": 2}, "top_k: got 3, wants at most the 2 experts"),
        (
            {"scores": "sigmoid", "n_groups": 4, "top_groups": 2, "group_score_experts": 4},
            "group_score_experts: got 4, wants at most a group's 3 experts",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        expert_routing(inputs()[0], 3, **options)
