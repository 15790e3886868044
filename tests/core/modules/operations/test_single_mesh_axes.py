"""Mesh axes of size 1 split nothing, so no spec that names them is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from ejkernel.modules import flash_attention, scaled_dot_product_attention

Q = jax.random.normal(jax.random.key(0), (2, 8, 2, 8))
BIAS = jax.random.normal(jax.random.key(1), (2, 1, 8, 8))
DP, SP = PartitionSpec("dp"), PartitionSpec(None, "sp")


@pytest.mark.parametrize("devices", [1, 2])
def test_specs_that_differ_in_axes_of_size_1_alone_agree(devices):
    mesh = Mesh(np.array(jax.devices()[:devices]).reshape(devices, 1), ("dp", "sp"))
    specs = (DP,) * 3 + (PartitionSpec("dp", None, "sp", None), None, None)
    got = scaled_dot_product_attention(Q, Q, Q, BIAS, causal=True, mesh=mesh, in_specs=specs, out_specs=DP)
    np.testing.assert_allclose(got, scaled_dot_product_attention(Q, Q, Q, BIAS, causal=True), rtol=1e-5, atol=1e-6)
    both = PartitionSpec(("dp", "sp"))
    got = flash_attention(Q, Q, Q, mesh=mesh, in_specs=(both, DP, DP), out_specs=both)
    np.testing.assert_allclose(got, flash_attention(Q, Q, Q), rtol=1e-5, atol=1e-6)


def test_keys_may_be_split_over_one_device_and_heads_unlike():
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("dp", "sp"))
    heads = PartitionSpec(None, None, "dp")
    got = flash_attention(Q, Q, Q, mesh=mesh, in_specs=(heads, SP, SP), out_specs=heads)
    np.testing.assert_allclose(got, flash_attention(Q, Q, Q), rtol=1e-5, atol=1e-6)


def test_axes_that_split_are_still_compared_and_unknown_ones_refused():
    mesh = Mesh(np.array(jax.devices()[:2]).reshape(1, 2), ("dp", "sp"))
    with pytest.raises(ValueError, match="cannot be split over devices"):
        flash_attention(Q, Q, Q, mesh=mesh, in_specs=(SP, SP, SP), out_specs=SP)
    with pytest.raises(ValueError, match="out_specs: the inputs' specs make the output"):
        flash_attention(Q, Q, Q, mesh=mesh, in_specs=(DP, DP, DP), out_specs=SP)
    with pytest.raises(ValueError, match="names mesh axis 'tp'"):
        flash_attention(Q, Q, Q, mesh=mesh, in_specs=(PartitionSpec("tp"), DP, DP), out_specs=DP)


def test_types_of_results_keep_axes_of_size_1():
    mesh = jax.make_mesh((1,), ("dp",), (jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        placed = jax.device_put(jnp.asarray(Q), jax.NamedSharding(mesh, DP))
        got = jax.jit(lambda x: flash_attention(x, x, x))(placed)
    assert jax.typeof(got).sharding.spec[0] == "dp"
