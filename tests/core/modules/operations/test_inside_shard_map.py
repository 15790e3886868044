"""Operations that a caller's own `jax.shard_map` calls on every device, where JAX keeps track of what varies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec
from transformed import graded

from ejkernel.modules import flash_attention
from ejkernel.ops.plugins import registry
from ejkernel_conformance.running import call, differentiable_inputs, leaves_by_name
from ejkernel_conformance.subjects import inputs, pinned_plan

SHARED, SPLIT = PartitionSpec(), PartitionSpec("rows")
# Ring attention and the collective products have devices of their own to talk to. The losses return numbers without
# axes, which `shard_map` cannot put together. Their tests run all of these over devices.
OTHERS = {
    "ring_attention",
    "all_gather_matmul",
    "reduce_scatter_matmul",
    "fused_cross_entropy",
    "fused_kl_divergence",
}
OPS = [op for op in registry().ops.values() if op.name not in OTHERS]


def mesh(devices):
    return jax.make_mesh((devices,), ("rows",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])


@pytest.mark.whole
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_every_operation_and_its_gradients_are_traced(op):
    """With one array that varies over devices, and all others the same on every one."""
    case = op.cases[0]
    (implementation,) = (x for x in registry().implementations[op.name] if x.name == "xla")
    names = differentiable_inputs(op, case) if any(i.backward for i in registry().implementations[op.name]) else ()
    plan, args = pinned_plan(op, implementation), inputs(case, 0)
    leaves, structure = leaves_by_name(args), jax.tree.structure(args)
    fields, first = list(leaves), next(name for name, x in leaves.items() if jnp.issubdtype(x.dtype, jnp.floating))

    def of_arrays(*arrays):
        return call(plan, jax.tree.unflatten(structure, arrays))

    run = graded(of_arrays, [fields.index(name) for name in names]) if names else of_arrays
    specs = tuple(SPLIT if name == first else SHARED for name in fields)
    results = jax.eval_shape(run, *leaves.values())
    # The gradient of what devices share is summed up over them, and the same on all.
    kept = (SPLIT, tuple(SPLIT if name == first else SHARED for name in names)) if names else SPLIT
    mapped = jax.shard_map(run, mesh=mesh(1), in_specs=specs, out_specs=kept)
    assert jax.tree.map(jnp.shape, jax.eval_shape(mapped, *leaves.values())) == jax.tree.map(jnp.shape, results)


@pytest.mark.needs("2 devices")
def test_the_gradient_of_what_devices_share_is_their_sum():
    query, key, value = jax.random.normal(jax.random.key(0), (3, 2, 12, 4, 8))
    sinks, bias = jnp.ones((4, 1)), jax.random.normal(jax.random.key(1), (1, 4, 1, 12))

    def attend(query, key, value, sinks, bias):
        return flash_attention(query, key, value, bias, None, None, sinks, causal=True)

    specs = (SPLIT, SPLIT, SPLIT, SHARED, SHARED)
    mapped = jax.shard_map(attend, mesh=mesh(2), in_specs=specs, out_specs=SPLIT)
    got, want = (
        jax.jit(jax.value_and_grad(lambda *x, f=f: (f(*x) ** 2).sum(), (0, 1, 2, 3, 4)))(query, key, value, sinks, bias)
        for f in (mapped, attend)
    )
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=2e-5, atol=2e-5), got, want)
