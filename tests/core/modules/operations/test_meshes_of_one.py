"""Mesh axes of size 1 split nothing: no mesh of one device refuses what is right without a mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from ejkernel.modules import flash_attention, mla_decode, scaled_dot_product_attention
from ejkernel.ops.call import call
from ejkernel.ops.plugins import registry
from ejkernel_conformance.subjects import inputs

P = PartitionSpec
OPS = sorted(registry().ops.values(), key=lambda op: op.name)


def mesh(*sizes):
    count = int(np.prod(sizes))
    names = ("dp", "sp")[: len(sizes)]
    return jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes), devices=jax.devices()[:count])


def test_a_bias_may_name_an_axis_of_one_that_queries_do_not():
    q, bias = jax.random.normal(jax.random.key(0), (2, 16, 4, 8)), jax.random.normal(jax.random.key(1), (2, 4, 16, 16))
    specs = (P("dp"),) * 3 + (P("dp", None, "sp", None), None, None)
    got = scaled_dot_product_attention(q, q, q, bias, mesh=mesh(1, 1), in_specs=specs, out_specs=P("dp"))

    np.testing.assert_allclose(got, scaled_dot_product_attention(q, q, q, bias), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_any_axes_of_one_are_accepted(op):
    """The first axis of every argument over one of them and the second over the other, which fits no operation."""
    args = inputs(op.cases[0], 0)
    ranks = [getattr(getattr(args, name), "ndim", 0) for name in op.axes]
    specs = tuple(P(*("dp", "sp")[:rank]) for rank in ranks)
    placed = {"mesh": mesh(1, 1), "in_specs": specs, "out_specs": P("sp")}
    got = jax.eval_shape(functools.partial(call, op, **placed), args)

    assert jax.tree.map(jnp.shape, got) == jax.tree.map(jnp.shape, jax.eval_shape(functools.partial(call, op), args))


def test_an_axis_of_one_beside_one_that_splits():
    q = jax.random.normal(jax.random.key(0), (4, 16, 4, 8))
    specs = (P("dp", "sp"), P(("dp", "sp")), P("dp"))
    got = flash_attention(q, q, q, causal=True, mesh=mesh(2, 1), in_specs=specs, out_specs=P("dp", None, "sp"))

    np.testing.assert_allclose(got, flash_attention(q, q, q, causal=True), rtol=1e-5, atol=1e-6)


def test_an_axis_that_splits_is_still_compared():
    q = jnp.ones((4, 16, 4, 8))
    with pytest.raises(ValueError, match="splits it over"):
        flash_attention(q, q, q, mesh=mesh(2, 2), in_specs=(P("dp"), P("sp"), P("dp")), out_specs=P("dp"))
    with pytest.raises(ValueError, match="names mesh axis 'tp'"):
        flash_attention(q, q, q, mesh=mesh(1, 1), in_specs=(P("tp"),) * 3, out_specs=P())


def test_mla_decode_splits_the_heads_of_one_latent():
    """Absorbed, all heads read one KV head: there is nothing to split of it, though the weights have heads."""
    keys = jax.random.split(jax.random.key(0), 4)
    query, cache = jax.random.normal(keys[0], (2, 8, 24)), jax.random.normal(keys[1], (2, 32, 40))
    w_kc, w_vc = jax.random.normal(keys[2], (32, 4, 16)), jax.random.normal(keys[3], (32, 4, 12))
    arguments = (query, cache, None, w_kc, w_vc, jnp.array([30, 3]))
    specs = (P(None, "dp"), None, None, P(None, "dp"), P(None, "dp"), None)
    got = mla_decode(*arguments, mesh=mesh(4), in_specs=specs, out_specs=P(None, "dp"))

    np.testing.assert_allclose(got, mla_decode(*arguments), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="axis 'g' of size 4 does not divide into 8 parts"):
        mla_decode(*arguments, mesh=mesh(8), in_specs=specs, out_specs=P(None, "dp"))
