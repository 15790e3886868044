"""Shards of a call with `mesh`: where each begins in the whole, and splits that make no sense."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ejkernel.modules import flash_attention

pytestmark = pytest.mark.needs("4 devices")


def mesh():
    return jax.make_mesh((2, 2), ("a", "b"), devices=jax.devices()[:4])


def attend(x, spec, key_spec=None, **options):
    placed = {"mesh": mesh(), "in_specs": (spec, spec if key_spec is None else key_spec, spec), "out_specs": spec}
    return flash_attention(x, x, x, **options, **placed)


def test_dropout_offset_of_a_shard_over_two_mesh_axes():
    """Dropout depends on the index of a batch row in the whole: here each row is on a device of its own."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 8, 2, 4)), jnp.float32)
    options = {"dropout_prob": 0.5, "dropout_seed": 7}
    whole = flash_attention(x, x, x, **options)
    for axes in (("a", "b"), ("b", "a")):
        np.testing.assert_allclose(attend(x, P(axes), **options), whole, rtol=2e-5, atol=2e-6)


def test_in_specs_that_split_one_axis_differently_are_refused():
    x = jnp.ones((4, 8, 2, 4))
    with pytest.raises(ValueError, match=r"key splits 'b' over \('b',\), query splits it over \('a',\)"):
        attend(x, P("a"), P("b"))


def test_a_batch_axis_not_divisible_by_the_mesh_is_refused():
    with pytest.raises(ValueError, match=r"axis 'b' of size 3 does not divide into 2 parts"):
        attend(jnp.ones((3, 8, 2, 4)), P("a"))


def test_a_causal_shard_of_queries_keeps_its_global_positions():
    x = jnp.asarray(np.random.default_rng(1).normal(size=(1, 8, 2, 4)), jnp.float32)
    placed = {"mesh": mesh(), "in_specs": (P(None, "a"), P(), P()), "out_specs": P(None, "a")}
    whole = flash_attention(x, x, x, causal=True)
    np.testing.assert_allclose(flash_attention(x, x, x, causal=True, **placed), whole, rtol=2e-5, atol=2e-6)
