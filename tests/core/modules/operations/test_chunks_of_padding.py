"""Recurrences over segments with padding that fills whole chunks: states pass through it, forward and backward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel.modules as ej
from ejkernel.modules.operations.configs import GatedDeltaRuleConfig

SEGMENTS = jnp.array([[0, 0, -1, -1, -1, -1, 0, 0, 1, -1, -1, -1]])
REAL = np.flatnonzero(np.asarray(SEGMENTS[0]) >= 0)
CFG = GatedDeltaRuleConfig(chunk_size=2)


@pytest.fixture(scope="module")
def inputs():
    keys = jax.random.split(jax.random.key(0), 6)
    rows = [jax.random.normal(key, (1, SEGMENTS.shape[1], 2, 4)) for key in keys[:3]]
    beta = jax.random.uniform(keys[3], (1, SEGMENTS.shape[1], 2))
    return (*rows, beta, -jax.random.uniform(keys[4], beta.shape), jax.random.normal(keys[5], (1, 2, 4, 4)))


def call(segments, query, key, value, beta, decay, state):
    key = key / jnp.linalg.norm(key, axis=-1, keepdims=True)
    results = ej.gated_delta_rule(
        query,
        key,
        value,
        beta,
        decay,
        initial_state=state,
        seg_ids=segments,
        return_state=True,
        cfg=CFG,
        platform="xla",
    )
    return jax.tree.leaves(results)


def losses(segments, *arrays):
    return sum(jnp.sum(jnp.sin(x)) for x in call(segments, *arrays))


def without_padding(arrays):
    return *(x[:, REAL] for x in arrays[:-1]), arrays[-1]


def test_outputs_and_states_are_those_without_padding(inputs):
    output, state = call(SEGMENTS, *inputs)
    for got, want in zip((output[:, REAL], state), call(SEGMENTS[:, REAL], *without_padding(inputs)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_gradients_are_those_without_padding(inputs):
    positions = tuple(range(1, 7))
    got = jax.jit(jax.grad(losses, positions))(SEGMENTS, *inputs)
    want = jax.jit(jax.grad(losses, positions))(SEGMENTS[:, REAL], *without_padding(inputs))
    for mine, theirs in zip(without_padding(got), want, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)
