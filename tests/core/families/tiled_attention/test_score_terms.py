"""`score_mod` as a soft cap."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.families.tiled_attention import TiledAttention
from ejkernel.families.tiled_attention.score_terms import score_function_as_soft_cap
from ejkernel.types.pair_functions import score_function


def as_soft_cap(function, **fields):
    array = jax.ShapeDtypeStruct((2, 40, 2, 8), jnp.float32)
    function = score_function("score_mod", function, jnp.float32)
    record = TiledAttention(query=array, key=array, value=array, softmax_scale=1.0, score_mod=function, **fields)
    return record, score_function_as_soft_cap(record)


@pytest.mark.parametrize(
    ("cap", "function"),
    [
        (20.0, lambda score, b, h, q, k: 20.0 * jnp.tanh(score / 20.0)),
        (30.0, lambda score, b, h, q, k: jnp.tanh(score * (1.0 / 30.0)) * 30.0),
        (50.0, lambda score, b, h, q, k: jnp.tanh(0.02 * score) * 50),
        (1.0, lambda score, b, h, q, k: jnp.tanh(score)),
        (7.3, lambda score, b, h, q, k: 7.3 * jnp.tanh(score / 7.3)),
    ],
)
def test_a_soft_cap_is_found(cap, function):
    _, found = as_soft_cap(function)
    assert found.logits_soft_cap == pytest.approx(cap)
    assert found.score_mod is None


@pytest.mark.parametrize(
    "function",
    [
        lambda score, b, h, q, k: 20.0 * jnp.tanh(score / 19.0),
        lambda score, b, h, q, k: -20.0 * jnp.tanh(score / -20.0),
        lambda score, b, h, q, k: 20.0 * jnp.tanh(score / 20.0) + (q - k),
        lambda score, b, h, q, k: 20.0 * jnp.tanh((score + q) / 20.0),
        lambda score, b, h, q, k: 20.0 * jnp.tanh(20.0 / score),
        lambda score, b, h, q, k: 20.0 * jnp.sin(score / 20.0),
        lambda score, b, h, q, k: q * jnp.tanh(score / 20.0),
        lambda score, b, h, q, k: score * 2.0,
        lambda score, b, h, q, k: np.inf * jnp.tanh(score / np.inf),
        lambda score, b, h, q, k: np.nan * jnp.tanh(score / np.nan),
    ],
)
def test_other_functions_are_kept(function):
    record, found = as_soft_cap(function)
    assert found is record


def test_a_function_that_captures_an_array_is_kept():
    cap = jnp.float32(20.0) * jnp.ones(())
    record, found = as_soft_cap(lambda score, b, h, q, k: cap * jnp.tanh(score / cap))
    assert found is record


def test_a_function_after_a_bias_is_kept():
    """A bias of -inf masks a pair before a soft cap, and is `-cap` after a function."""
    bias = jnp.zeros((1, 1, 4, 4))
    record, found = as_soft_cap(lambda score, b, h, q, k: 20.0 * jnp.tanh(score / 20.0), bias=bias)
    assert found is record


def test_a_function_after_a_soft_cap_is_kept():
    record, found = as_soft_cap(lambda score, b, h, q, k: 20.0 * jnp.tanh(score / 20.0), logits_soft_cap=30.0)
    assert found is record
