"""`all_gather_matmul` and `reduce_scatter_matmul` over devices, next to float64 loops, and their errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import ejkernel
from ejkernel.modules import (
    AllGatherMatmulConfig,
    ReduceScatterMatmulConfig,
    all_gather_matmul,
    reduce_scatter_matmul,
)

M, K, N = 16, 24, 40
CONFIGS = {all_gather_matmul: AllGatherMatmulConfig, reduce_scatter_matmul: ReduceScatterMatmulConfig}
SPECS = {
    all_gather_matmul: ((P("tp"), P(None, "tp")), P(None, "tp")),
    reduce_scatter_matmul: ((P(None, "tp"), P(None, "tp")), P("tp")),
}


def mesh_of(devices):
    return jax.make_mesh((devices,), ("tp",), (AxisType.Auto,), devices=jax.devices()[:devices])


def matrices(op, dtype=jnp.float32, m=M):
    x, y = np.random.default_rng(0).normal(size=(m, K)), np.random.default_rng(1).normal(size=(K, N))
    return jnp.asarray(x, dtype), jnp.asarray(y if op is all_gather_matmul else y.T, dtype)


def loop(x, y):
    """x @ y, one entry after another, in float64."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    output = np.zeros((x.shape[0], y.shape[1]))
    for i, row in enumerate(x):
        for j, column in enumerate(y.T):
            output[i, j] = sum(float(a) * float(b) for a, b in zip(row, column, strict=True))
    return output


def weighted(call):
    """((sum of a call's output times fixed weights, the output), gradients of x and y)."""

    def loss(x, y):
        output = call(x, y)
        weights = jnp.asarray(np.random.default_rng(2).normal(size=output.shape), output.dtype)
        return jnp.vdot(weights, output), output

    return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))


def test_one_device_computes_the_product_of_a_loop():
    for op in SPECS:
        x, y = matrices(op)
        want = loop(x, y if op is all_gather_matmul else y.T)
        np.testing.assert_allclose(op(x, y, None), want, rtol=1e-5, atol=1e-5)


@pytest.mark.needs("4 devices")
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("devices", [1, 2, 4, 8])
@pytest.mark.parametrize("op", SPECS, ids=lambda op: op.__name__)
def test_devices_compute_the_product_and_its_gradients(op, devices, overlap):
    x, y = matrices(op)
    placed = {"mesh": mesh_of(devices), "in_specs": SPECS[op][0], "out_specs": SPECS[op][1]}
    spread = weighted(lambda x, y: op(x, y, "tp", tp_size=devices, cfg=CONFIGS[op](overlap=overlap), **placed))
    (_, output), gradients = spread(x, y)
    (_, want), wanted_gradients = weighted(lambda x, y: x @ (y if op is all_gather_matmul else y.T))(x, y)
    np.testing.assert_allclose(output, want, rtol=1e-5, atol=1e-5)
    for gradient, wanted in zip(gradients, wanted_gradients, strict=True):
        np.testing.assert_allclose(gradient, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.needs("4 devices")
@pytest.mark.parametrize("split", ["dp", None])
def test_arrays_that_are_equal_along_the_axis_have_all_of_its_gradient(split):
    """Two devices gather the same rows of x, so that each product is there four times."""
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    x, y = jax.random.normal(jax.random.key(0), (4, 6)), jax.random.normal(jax.random.key(1), (6, 5))

    def spread(x, y):
        def run(x, y):
            return all_gather_matmul(x, y, "tp", cfg=AllGatherMatmulConfig(overlap=True))

        out_specs = P((split, "tp") if split else "tp")
        return jax.shard_map(run, mesh=mesh, in_specs=(P(split), P()), out_specs=out_specs)(x, y)

    def gradients(product):
        return jax.jit(jax.grad(lambda x, y: jnp.sum(jnp.sin(product(x, y)) * jnp.arange(1.0, 6)), (0, 1)))(x, y)

    for got, want in zip(gradients(spread), gradients(lambda x, y: x @ y), strict=True):
        np.testing.assert_allclose(got, 4 * want, rtol=1e-4, atol=1e-4)


@pytest.mark.needs("4 devices")
@pytest.mark.parametrize("check_vma", [True, False])
def test_a_feed_forward_in_shard_map_has_the_gradients_of_one_device(check_vma):
    """Both products in a function of the caller's, with an odd ring, a transposed matrix and a replicated scale."""
    devices, keys = 3, jax.random.split(jax.random.key(0), 4)
    x, up = jax.random.normal(keys[0], (9, 8)), jax.random.normal(keys[1], (24, 8))
    down, scale = jax.random.normal(keys[2], (8, 24)), jax.random.normal(keys[3], (8,))

    def spread(x, up, down, scale):
        ring = {"platform": "xla", "cfg": AllGatherMatmulConfig(overlap=True)}
        hidden = jnp.tanh(all_gather_matmul(x * scale, up, "tp", rhs_transpose=True, **ring))
        return reduce_scatter_matmul(hidden, down, "tp", cfg=ReduceScatterMatmulConfig(overlap=True))

    specs = (P("tp"), P("tp"), P(None, "tp"), P())
    mapped = jax.shard_map(spread, mesh=mesh_of(devices), in_specs=specs, out_specs=P("tp"), check_vma=check_vma)
    alone = lambda x, up, down, scale: jnp.tanh((x * scale) @ up.T) @ down.T  # noqa: E731
    got, want = (
        jax.jit(jax.value_and_grad(lambda *arrays, f=f: jnp.sum(f(*arrays) ** 2), (0, 1, 2, 3)))(x, up, down, scale)
        for f in (mapped, alone)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), got, want)


@pytest.mark.needs("4 devices")
@pytest.mark.parametrize("op", SPECS, ids=lambda op: op.__name__)
def test_batches_and_second_tangents_in_a_shard_map_of_the_caller(op):
    x, y = matrices(op)
    mapped = jax.shard_map(lambda x, y: op(x, y, "tp"), mesh=mesh_of(2), in_specs=SPECS[op][0], out_specs=SPECS[op][1])
    rows = jnp.stack([x, 2 * x, 3 * x])

    def batch_and_curvature(product):
        def gradient(x):
            return jax.grad(lambda x: jnp.sum(jnp.sin(product(x, y))))(x)

        return jax.jit(lambda: (jax.vmap(product, (0, None))(rows, y), jax.jvp(gradient, (x,), (x,))))()

    want = batch_and_curvature(lambda x, y: x @ (y if op is all_gather_matmul else y.T))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), batch_and_curvature(mapped), want)


@pytest.mark.needs("4 devices")
def test_sums_of_bfloat16_are_rounded_once():
    """The ring's sums travel in float32: eight devices add what one device adds, and round it once."""
    x, y = matrices(reduce_scatter_matmul, jnp.bfloat16)
    cfg = ReduceScatterMatmulConfig(overlap=True)
    output = reduce_scatter_matmul(x, y, "tp", mesh=mesh_of(8), cfg=cfg)
    want = loop(x, y.T)
    assert np.all(np.abs(np.asarray(output, np.float64) - want) <= np.abs(want) * 2.0**-8)


@pytest.mark.needs("4 devices")
def test_every_transfer_of_a_ring_is_under_a_product():
    """No collective of XLA: on eight devices four transfers one way and three the other, each of one device's rows."""
    for op in SPECS:
        x, y = matrices(op)
        call = jax.jit(lambda x, y, op=op: op(x, y, "tp", mesh=mesh_of(8), cfg=CONFIGS[op](overlap=True)))
        text = call.lower(x, y).as_text()
        assert text.count("collective_permute") == 7, op
        assert text.count("dot_general") == 8, op
        assert '"stablehlo.all_gather"' not in text
        assert '"stablehlo.reduce_scatter"' not in text


@pytest.mark.needs("4 devices")
def test_explicit_axes_need_no_specs():
    mesh = jax.make_mesh((4,), ("tp",), (AxisType.Explicit,), devices=jax.devices()[:4])
    for op, (in_specs, out_specs) in SPECS.items():
        x, y = matrices(op)
        with jax.set_mesh(mesh):
            placed = (jax.reshard(a, spec) for a, spec in zip((x, y), in_specs, strict=True))
            output = op(*placed, "tp")
        assert output.sharding.is_equivalent_to(jax.sharding.NamedSharding(mesh, out_specs), 2)
        np.testing.assert_allclose(output, op(x, y, None), rtol=1e-5, atol=1e-5)


@pytest.mark.needs("4 devices")
def test_explain_names_the_schedule_of_a_shard():
    x, y = matrices(all_gather_matmul)
    decision = ejkernel.explain(all_gather_matmul, x, y, "tp", mesh=mesh_of(8), cfg=AllGatherMatmulConfig(overlap=True))
    assert "overlap=True" in str(decision)


WHOLE = jnp.zeros((M, K))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: all_gather_matmul(WHOLE, jnp.zeros((K + 1, N)), None), r"y: got shape \(25, 40\), wants \[24, N\]"),
        (
            lambda: reduce_scatter_matmul(WHOLE, jnp.zeros((N, K - 1)), None),
            r"y: got shape \(40, 23\), wants \[N, 24\]",
        ),
        (lambda: all_gather_matmul(WHOLE[0], jnp.zeros((K, N)), None), r"x: got shape \(24,\), wants two axes"),
        (lambda: all_gather_matmul(WHOLE, jnp.zeros((K, N), jnp.bfloat16), None), "y: got dtype bfloat16, wants x's"),
        (lambda: all_gather_matmul(WHOLE, jnp.zeros((K, N), int), None), "y: got dtype int32, wants a floating"),
        (lambda: all_gather_matmul(WHOLE, jnp.zeros((K, N)), ("tp",)), "axis_name: got tuple"),
        (lambda: all_gather_matmul(WHOLE, jnp.zeros((K, N)), "tp"), "axis_name: got 'tp', which is bound by no"),
        (lambda: all_gather_matmul(WHOLE, jnp.zeros((K, N)), None, collective_id=-1), "collective_id: got int -1"),
        (lambda: all_gather_matmul(WHOLE, jnp.zeros((K, N)), None, tp_size=4), "tp_size: got 4, wants 1 or None"),
        (lambda: all_gather_matmul(WHOLE, jnp.zeros((K, N)), None, precision="most"), "precision: got str 'most'"),
    ],
)
def test_wrong_calls_say_what_is_wrong(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.needs("4 devices")
@pytest.mark.parametrize(
    ("op", "rows", "options", "message"),
    [
        (reduce_scatter_matmul, 14, {}, r"x: got shape \(14, 24\), wants axis 0 to divide among the 4 devices"),
        (all_gather_matmul, 14, {}, r"x: got shape \(14, 24\), wants axis 0 to divide among the 4 devices of 'tp'"),
        (all_gather_matmul, 0, {}, r"x: got shape \(0, 24\), wants no empty axis over 4 devices"),
        (all_gather_matmul, M, {"axis_name": "dp"}, "axis_name: got 'dp', the mesh has 'tp'"),
        (all_gather_matmul, M, {"tp_size": 8}, "tp_size: got 8, axis 'tp' has 4 devices"),
        (
            all_gather_matmul,
            M,
            {"in_specs": (P(None, "tp"), P("tp")), "out_specs": P()},
            "in_specs: axis_name='tp' wants axis 0 of x split over 'tp'",
        ),
        (
            reduce_scatter_matmul,
            M,
            {"in_specs": (P(None, "tp"), P()), "out_specs": P()},
            "in_specs: axis_name='tp' wants axis 1 of y split over 'tp'",
        ),
    ],
)
def test_wrong_calls_over_devices_say_what_is_wrong(op, rows, options, message):
    x, y = matrices(op, m=rows)
    with pytest.raises(ValueError, match=message):
        op(x, y, **{"axis_name": "tp", "mesh": mesh_of(4), **options})
