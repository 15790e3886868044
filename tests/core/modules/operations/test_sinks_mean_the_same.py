"""`softmax_aux` in every operation that has it: one sink a head, or sinks that heads share."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.modules import flash_attention, operations
from ejkernel.modules.operations.shared.sinks import sink_logits

OPS = {op.name: op for op in operations.OPS if "softmax_aux" in op.signature.parameters}
HEADS_AXIS = {"blocksparse_attention": 1, "attention": 2, "flash_attention": 2, "flash_mla": 2, "ring_attention": 2}


@pytest.mark.parametrize("name", OPS)
def test_t12_a_vector_with_one_sink_a_head_is_just_that(name):
    op = OPS[name]
    case = next(case for case in op.cases if "softmax_aux" not in case.exercises)
    args = case.make(jax.random.key(0))
    given = {field.name: getattr(args, field.name) for field in dataclasses.fields(args)}
    del given["softmax_aux"]
    query = next(iter(given.values()))
    heads = query.shape[HEADS_AXIS.get(name, -2)]
    by_head = jnp.linspace(-1, 3, heads, dtype=jnp.float32)
    shared = jnp.linspace(2, -1, heads + 1, dtype=jnp.float32)

    @jax.jit
    def logits(sinks):
        return op.lower(op.arguments(**given, softmax_aux=sinks)).softmax_aux

    want = sink_logits(by_head, heads, jnp.float32)
    for sinks in (by_head, by_head[:, None]):
        np.testing.assert_allclose(logits(sinks), want, rtol=1e-6)
    for sinks in (shared, shared[None], jnp.broadcast_to(shared, (heads, heads + 1))):
        np.testing.assert_allclose(logits(sinks), jax.nn.logsumexp(shared)[None].repeat(heads), rtol=1e-6)
    np.testing.assert_allclose(logits(by_head[None]), jax.nn.logsumexp(by_head)[None].repeat(heads), rtol=1e-6)

    run = jax.jit(lambda sinks: jax.tree.leaves(op.function(**given, softmax_aux=sinks, platform="xla"))[0])
    np.testing.assert_array_equal(run(by_head), run(by_head[:, None]))
    assert (run(by_head) != run(by_head[None])).any()


def test_t12_a_model_of_the_gpt_oss_kind_gets_its_sinks():
    query, key, value = np.random.default_rng(0).normal(size=(3, 1, 6, 4, 8)).astype(np.float32)
    sinks = np.array([2.0, -1.0, 0.5, 30.0], np.float32)
    scores = np.einsum("bthd,bshd->bhts", query, key).astype(np.float64) * 8**-0.5
    weights = np.exp(np.where(np.tri(6, dtype=bool), scores, -np.inf))
    weights /= weights.sum(-1, keepdims=True) + np.exp(np.float64(sinks))[:, None, None]
    want = np.einsum("bhts,bshd->bthd", weights, value)
    got = flash_attention(query, key, value, softmax_aux=sinks, causal=True)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_the_gradient_of_one_sink_a_head_is_the_heads_own():
    query, key, value = jax.random.normal(jax.random.key(0), (3, 1, 6, 4, 8))
    sinks = jnp.array([2.0, -1.0, 0.5, 0.0])

    def loss(sinks):
        return jnp.sum(flash_attention(query, key, value, softmax_aux=sinks)[:, :, 1] ** 2)

    gradient, matrix = jax.grad(loss)(sinks), jax.grad(loss)(sinks[:, None])
    np.testing.assert_allclose(gradient, matrix[:, 0], rtol=1e-6)
    np.testing.assert_array_equal(gradient[jnp.array([0, 2, 3])], 0)
    assert gradient[1] != 0
