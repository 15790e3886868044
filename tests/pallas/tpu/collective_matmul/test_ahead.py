"""Collective products compiled for slices of real chips by their own compiler, and how busy their matrix units are."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from suite.chips import pair_cases_with_chips

from ejkernel.modules import all_gather_matmul, reduce_scatter_matmul
from ejkernel_pallas.tpu.profile import CHIPS, Case, Workload, profile_many

pytestmark = [pytest.mark.needs("libtpu"), pytest.mark.timeout(600)]

KERNELS = {
    "gather": "ejkernel_all_gather_matmul",
    "scatter": "ejkernel_reduce_scatter_matmul",
    "weight": "ejkernel_collective_weight_gradient",
}
DEVICES = 4


def product(kind, rows, width, hidden, dtype):
    """One kernel of four devices, on shapes of one device: rows, and [width, hidden] weights."""
    rows_spec, columns_spec = P("tp"), P(None, "tp")
    x, hidden_rows, weight = (rows, width), (rows, hidden), (width, hidden)

    def over_devices(op, *arrays):
        mesh: Any = jax.sharding.get_abstract_mesh()
        return op(*arrays, "tp", mesh=mesh, platform="pallas")

    def gradient(y, x):
        return jax.grad(lambda y: over_devices(all_gather_matmul, x, y).astype(jnp.float32).sum())(y)

    functions = {
        "gather": lambda x, y: over_devices(all_gather_matmul, x, y),
        "scatter": lambda x, y: over_devices(reduce_scatter_matmul, x, y),
        "weight": gradient,
    }
    arrays, specs = {
        "gather": ((x, weight), (rows_spec, columns_spec)),
        "scatter": ((hidden_rows, weight), (columns_spec, columns_spec)),
        "weight": ((weight, x), (columns_spec, rows_spec)),
    }[kind]
    whole = [(DEVICES * m, n) if m == rows else (m, DEVICES * n) for m, n in arrays]
    if kind == "scatter":
        whole[0] = (DEVICES * rows, DEVICES * hidden)
    return Workload(
        function=functions[kind],
        args=tuple(jax.ShapeDtypeStruct(shape, dtype) for shape in whole),
        mesh_axes={"tp": DEVICES},
        partition_specs=specs,
    )


@pytest.mark.parametrize(("kind", "target"), pair_cases_with_chips(KERNELS, CHIPS))
def test_a_kernel_computes_products_most_of_the_time_that_it_does_not_wait(kind, target):
    kwargs = {"kind": kind, "rows": 1024, "width": 2048, "hidden": 4096, "dtype": "bfloat16"}
    (report,) = profile_many([Case(label=kind, build=f"{__file__}:product", kwargs=kwargs)], target=target)
    assert report.error is None
    (kernel,) = (kernel for kernel in report.kernels if kernel.name.startswith(KERNELS[kind]))
    assert kernel.simulation.is_complete
    assert kernel.simulation.mxu_cycles > 0.7 * kernel.simulation.compute_cycles
    # Every device sends to both neighbours, in each step but the last, what one stream has.
    sent = 1024 * 2048 * (4 if kind == "scatter" else 2)
    assert kernel.simulation.bytes_sent_to_devices == (DEVICES - 1) * sent
    assert kernel.simulation.busiest_link_bytes == kernel.simulation.bytes_sent_to_devices / 2


@pytest.mark.parametrize("kind", KERNELS)
def test_products_of_awkward_sizes_in_float32_compile(kind):
    kwargs = {"kind": kind, "rows": 40, "width": 200, "hidden": 130, "dtype": "float32"}
    (report,) = profile_many([Case(label=kind, build=f"{__file__}:product", kwargs=kwargs)], target="v5e")
    assert report.error is None
