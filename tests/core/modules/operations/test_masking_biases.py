"""An additive mask of -inf masks, with a soft cap and without one: values and gradients are those of the mask."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_functions import DENSE

import ejkernel.modules as m
from ejkernel.types import MaskInfo

T, H, G, D = 6, 2, 1, 8
KEYS = jax.random.split(jax.random.key(0), 4)
Q, K, V = (jax.random.normal(k, (1, T, n, D)) for k, n in zip(KEYS[:3], (H, G, G), strict=True))
MASKED = jax.random.bernoulli(jax.random.key(1), 0.4, (1, H, T, T)).at[:, :, 2].set(True).at[:, 1, :, 3].set(True)
BIAS = jax.random.normal(KEYS[3], (1, H, T, T))


def naive(bias, cap):
    """Attention in float64 over the pairs whose bias is not -inf."""
    query, key, value, bias = (np.asarray(x, np.float64) for x in (Q, K, V, bias))
    output = np.zeros((1, T, H, D))
    for h in range(H):
        for i in range(T):
            seen = bias[0, h, i] > -np.inf
            scores = query[0, i, h] @ key[0, seen, 0].T * D**-0.5 + bias[0, h, i, seen]
            weights = np.exp(scores if cap is None else cap * np.tanh(scores / cap))
            if seen.any():
                output[0, i, h] = weights / weights.sum() @ value[0, seen, 0]
    return output


FUNCTIONS = {
    **DENSE,
    "attention with weights": lambda *arrays, **options: m.attention(*arrays, **options, return_weights=True)[0],
}
CALLS = [(name, cap) for name in FUNCTIONS for cap in ((None,) if name.startswith("scaled") else (None, 1.5))]


@pytest.mark.parametrize(("name", "cap"), CALLS)
def test_a_bias_of_minus_infinity_masks(name, cap):
    call, hiding = FUNCTIONS[name], jnp.where(MASKED, -jnp.inf, BIAS)
    capped = {} if cap is None else {"logits_soft_cap": cap}

    def total(query, key, value, bias, **options):
        output = call(query, key, value, bias=bias, **capped, **options)
        return jnp.sum(output * jnp.cos(jnp.arange(output.size).reshape(output.shape))), output

    gradient = jax.grad(total, argnums=(0, 1, 2, 3), has_aux=True)
    got, output = gradient(Q, K, V, hiding)
    np.testing.assert_allclose(output, naive(hiding, cap), rtol=2e-5, atol=2e-5)
    wants, _ = gradient(Q, K, V, BIAS, mask_info=MaskInfo(_attention_mask=~MASKED))
    for one, other in zip(got, wants, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("cap", [None, 1.5])
def test_a_bias_of_minus_infinity_masks_pairs_of_new_tokens(cap):
    queries, cache = Q[0], jnp.concatenate([K[0], V[0]])[:8].reshape(2, 4, G, D)
    context = 8 - T  # keys that are no queries have no bias
    bias = jnp.where(MASKED[0, 0], -jnp.inf, BIAS[0, 0])
    output, lse = m.unified_attention(
        queries,
        cache,
        cache,
        jnp.array([8]),
        jnp.array([[0, 1]]),
        jnp.array([0, T]),
        qq_bias=bias,
        causal=False,
        logits_soft_cap=cap,
        sliding_window=(None, None),
        return_lse=True,
    )
    keys, bias = np.asarray(cache, np.float64).reshape(8, D), np.asarray(bias, np.float64)
    for i in range(T):
        for h in range(H):
            scores = keys @ np.asarray(queries[i, h], np.float64) * D**-0.5
            scores[context:] += bias[i]
            seen = scores > -np.inf
            scores = scores[seen] if cap is None else cap * np.tanh(scores[seen] / cap)
            weights = np.exp(scores)
            np.testing.assert_allclose(output[i, h], weights / weights.sum() @ keys[seen], rtol=2e-5, atol=2e-5)
            np.testing.assert_allclose(lse[i, h], np.log(weights.sum()), rtol=1e-5, atol=1e-5)
