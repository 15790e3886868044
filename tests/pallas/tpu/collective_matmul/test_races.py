"""The kernels that send rows and sums by themselves, on simulated devices that watch for races."""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from tpu_races import found
from tpu_records import simulated

from ejkernel.families.collective_matmul import CollectiveMatmul
from ejkernel.types.pullback import Pullback
from ejkernel_pallas.tpu.collective_matmul.backward import backward
from ejkernel_pallas.tpu.collective_matmul.config import TpuCollective
from ejkernel_pallas.tpu.collective_matmul.forward import forward
from ejkernel_pallas.tpu.collective_matmul.kernels.streams import Stream

TILES = TpuCollective(block_m=128, block_n=128, block_k=128)


def both(collective, devices, *, transpose_y, sizes=(16, 200, 130)):
    """Output and gradients of x and y on every device, and those of one device."""
    m, k, n = sizes
    gathers = collective == "all_gather"
    random = np.random.default_rng(0)
    x, y, cotangent = (jnp.asarray(random.normal(size=size), jnp.float32) for size in ((m, k), (k, n), (m, n)))
    expected = x @ y, cotangent @ y.T, x.T @ cotangent
    if transpose_y:
        y, expected = y.T, (*expected[:2], expected[2].T)
    rows, columns = P("tp"), P(None, "tp")
    y_spec = P("tp") if gathers == transpose_y else columns
    if gathers:
        specs, out = (rows, y_spec, columns), columns
    else:
        specs, out = (columns, columns if transpose_y else rows, rows), rows

    def run(x, y, cotangent):
        record = CollectiveMatmul(
            x=x, y=y, collective=collective, axis_name="tp", transpose_y=transpose_y, collective_id=0
        )
        output, residuals = forward(record, TILES)
        pullback = Pullback(
            record=record,
            residuals=residuals,
            output=output,
            cotangent=cotangent,
            grad_fields=frozenset({"x", "y"}),
        )
        grads = backward(pullback, TILES)
        return output, grads["x"], grads["y"]

    mesh = jax.make_mesh((devices,), ("tp",), (AxisType.Auto,), devices=jax.devices()[:devices])
    mapped = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=(out, *specs[:2]), check_vma=False)
    with simulated():
        return jax.block_until_ready(jax.jit(mapped)(x, y, cotangent)), expected


@pytest.mark.needs("4 devices")
@pytest.mark.parametrize(("devices", "transpose_y", "sizes"), [(4, False, (96, 200, 520)), (2, True, (64, 300, 256))])
def test_products_of_gathered_rows_have_no_races(devices, transpose_y, sizes):
    check("all_gather", devices, transpose_y, sizes)


@pytest.mark.needs("4 devices")
@pytest.mark.parametrize(("devices", "transpose_y", "sizes"), [(4, True, (96, 512, 130)), (2, True, (64, 256, 300))])
def test_scattered_sums_of_products_have_no_races(devices, transpose_y, sizes):
    check("reduce_scatter", devices, transpose_y, sizes)


def check(collective, devices, transpose_y, sizes):
    """No race is found, and output and gradients are those of one device."""
    got, expected = both(collective, devices, transpose_y=transpose_y, sizes=sizes)
    assert not found()
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.needs("4 devices")
def test_a_slot_written_too_early_is_reported_as_a_race():
    with mock.patch.object(Stream, "signal_free_slot"), mock.patch.object(Stream, "wait_free_slot"):
        both("all_gather", 4, transpose_y=False, sizes=(64, 128, 512))
    assert found()
