"""A bias of -inf around cuDNN's calls, with a stand-in for them whose softmax of nothing is NaN, as its own may be."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.families import tiled_attention
from ejkernel.modules.operations.flash_attention import OP, lower
from ejkernel.types.pullback import Pullback
from ejkernel_cuda.tiled_attention import backward, forward

FIELDS = ("query", "key", "value", "bias")


def scores(record, query, key, bias):
    product = jnp.einsum("bthd,bshd->bhts", *(x.astype(jnp.float32) for x in (query, jnp.repeat(key, 2, 2))))
    causal = jnp.tril(jnp.ones(product.shape[2:], bool))
    return jnp.where(causal, product * record.softmax_scale + bias.astype(jnp.float32), -jnp.inf)


def stand_in(record, direction, products, operands, arrays, others):
    """Causal attention with a bias and its gradients, as cuDNN's custom calls give them."""
    (query, key), values = operands[:2], jnp.repeat(operands[2], 2, 2).astype(jnp.float32)
    if not direction:
        s = scores(record, query, key, operands[3])
        lse = jax.nn.logsumexp(s, axis=-1)
        return jnp.einsum("bhts,bshd->bthd", jnp.exp(s - lse[..., None]), values).astype(query.dtype), lse
    lse, cotangent, bias, output = operands[3:]
    weights = jnp.exp(scores(record, query, key, bias) - lse[..., None])
    delta = jnp.einsum("bthd,bthd->bht", cotangent.astype(jnp.float32), output.astype(jnp.float32))
    ds = weights * (jnp.einsum("bthd,bshd->bhts", cotangent.astype(jnp.float32), values) - delta[..., None])
    grads = (
        jnp.einsum("bhts,bshd->bthd", ds, jnp.repeat(key, 2, 2)) * record.softmax_scale,
        _paired(jnp.einsum("bhts,bthd->bshd", ds, query) * record.softmax_scale),
        _paired(jnp.einsum("bhts,bthd->bshd", weights, cotangent)),
        ds.sum(0, keepdims=True),
    )
    return tuple(x.astype(jnp.float32) for x in grads)


def _paired(x):
    return x.reshape(*x.shape[:2], 2, 2, x.shape[3]).sum(3)


@pytest.fixture(name="record")
def case(monkeypatch):
    for module in (forward, backward):
        monkeypatch.setattr(module, "emit_custom_call", stand_in)
    [found] = [case for case in OP.cases if case.name == "bfloat16, causal and bias of -inf, lse"]
    return lower(found.make(jax.random.key(0)))


def test_rows_that_a_bias_masks_are_zero(record):
    output, residuals = forward.forward(record, None)
    wants, reference = tiled_attention.reference(record)
    masked = np.isneginf(reference.lse)
    assert masked.any()
    np.testing.assert_array_equal(np.isneginf(residuals.lse), masked)
    np.testing.assert_allclose(residuals.lse[~masked], reference.lse[~masked], atol=2e-2)
    np.testing.assert_allclose(output.astype(jnp.float32), wants.astype(jnp.float32), atol=2e-2)


def test_gradients_of_rows_that_a_bias_masks_are_zero(record):
    cotangent = jax.random.normal(jax.random.key(1), record.query.shape).astype(record.query.dtype)
    output, residuals = forward.forward(record, None)
    pullback = Pullback(
        record=record, residuals=residuals, output=output, cotangent=cotangent, grad_fields=frozenset(FIELDS)
    )
    got = backward.backward(pullback, None)

    def loss(fields):
        value, _ = tiled_attention.reference(dataclasses.replace(record, **fields))
        return jnp.sum(value.astype(jnp.float32) * cotangent.astype(jnp.float32))

    wants = jax.grad(loss)({name: getattr(record, name) for name in FIELDS})
    for name in FIELDS:
        np.testing.assert_allclose(got[name], wants[name].astype(jnp.float32), atol=6e-2, rtol=3e-2, err_msg=name)
