"""The grouped-matmul kernels compiled for real chips by their own compiler, which needs none of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tpu_chips import CHIPS, compiled, on_chips, shaped

from ejkernel.families.grouped_matmul import GroupedMatmul
from ejkernel.modules import grouped_matmul
from ejkernel.ops.device import DeviceInfo, target_device
from ejkernel.types.pullback import Pullback
from ejkernel_pallas.tpu.grouped_matmul import config
from ejkernel_pallas.tpu.grouped_matmul.backward import backward
from ejkernel_pallas.tpu.grouped_matmul.config import TpuMatmul
from ejkernel_pallas.tpu.grouped_matmul.forward import forward
from ejkernel_pallas.tpu.profile import CHIPS as PROFILED
from ejkernel_pallas.tpu.profile import Case, Workload, profile_many

pytestmark = pytest.mark.needs("libtpu")

SMALL = TpuMatmul(block_m=128, block_k=256, block_n=128)


def record(m, k, n, e, rhs="bfloat16", blocks=0, transpose=False, dtype="bfloat16"):
    return GroupedMatmul(
        lhs=shaped((m, k), dtype),
        rhs=shaped((e, n, k) if transpose else (e, k, n), rhs),
        group_sizes=shaped((e,), "int32"),
        out_dtype=jnp.dtype("float32"),
        existing_out=shaped((m, n), dtype),
        rhs_scale=shaped((e, blocks, 1, n), "float32") if blocks else None,
        rhs_bias=shaped((e, 1, n), dtype),
        transpose_rhs=transpose,
        left_over="zero",
    )


def gradients(wanted, record, cotangent):
    pullback = Pullback(record=record, residuals=(), output=None, cotangent=cotangent, grad_fields=wanted)
    return backward(pullback, SMALL)


RECORDS = {
    "bfloat16": record(300, 600, 200, 3),
    "float32, transposed, scales that cut tiles": record(300, 600, 200, 3, "float32", 5, True, "float32"),
    "int8, scales of whole lanes": record(300, 512, 200, 3, "int8", 2),
    "float8, a scale of columns": record(300, 600, 200, 3, "float8_e4m3fn", 1, True),
    "float8, scales that cut tiles": record(300, 600, 200, 3, "float8_e5m2", 8),
}


@pytest.mark.parametrize(("case", "name"), on_chips(RECORDS))
def test_all_fields_compile_at_awkward_shapes(case, name):
    made = RECORDS[case]
    fields = {"lhs", "existing_out", "rhs_bias"} | ({"rhs"} if made.rhs.dtype.itemsize > 1 else set())
    fields |= {"rhs_scale"} if made.rhs_scale is not None else set()
    cotangent = shaped((made.lhs.shape[0], 200), "float32")
    with target_device(DeviceInfo(platform="tpu", vendor="google", kind=PROFILED[name].kind)):
        there = compiled(lambda record: forward(record, SMALL)[0], (made,), name)
        back = compiled(functools.partial(gradients, frozenset(fields)), (made, cotangent), name)
    assert "ejkernel_grouped_matmul" in there.as_text()
    assert "ejkernel_grouped_matmul_backward_matrices" in back.as_text()


def model(target):
    """The experts of a model, with the tiles that nobody chose; forward and backward."""
    made = GroupedMatmul(
        lhs=shaped((4096, 1024)),
        rhs=shaped((8, 1024, 512)),
        group_sizes=np.full(8, 512, np.int32),
        out_dtype=jnp.dtype("bfloat16"),
        left_over="zero",
    )
    device = DeviceInfo(platform="tpu", vendor="google", kind=PROFILED[target].kind)

    def both(record, cotangent):
        wanted = frozenset({"lhs", "rhs"})
        pullback = Pullback(record=record, residuals=(), output=None, cotangent=cotangent, grad_fields=wanted)
        there = forward(record, config.heuristic(record, device, "forward"))[0]
        return there, backward(pullback, config.heuristic(record, device, "backward"))

    return Workload(function=both, args=(made, shaped((4096, 512))), flops=6 * 4096 * 1024 * 512)


@pytest.mark.parametrize("name", CHIPS)
def test_a_model_spills_nothing_and_fits_into_memory(name):
    (report,) = profile_many([Case(label="experts", build=f"{__file__}:model", kwargs={"target": name})], target=name)
    assert report.error is None
    assert len(report.kernels) == 3
    for kernel in report.kernels:
        assert kernel.simulation.unknown_reads == {}
        assert kernel.vmem_bytes < PROFILED[name].vmem
        assert kernel.spills == kernel.fills == 0, kernel.name


def gradient_of_rows():
    """The gradient of lhs with the tiles of the table."""

    def gradient(lhs, rhs, output, sizes):
        def multiply(lhs):
            return grouped_matmul(lhs, rhs, sizes, preferred_element_type=jnp.bfloat16, platform="pallas")

        return jax.vjp(multiply, lhs)[1](output)

    arrays = (shaped((8192, 4096)), shaped((8, 4096, 4096)), shaped((8192, 4096)))
    return Workload(function=gradient, args=(*arrays, np.full(8, 1024, np.int32)), flops=2 * 8192 * 4096**2)


def test_matrix_units_of_v7x_drain_once_per_tile():
    (report,) = profile_many([Case(label="rows", build=f"{__file__}:gradient_of_rows")], target="v7x")
    assert report.error is None
    (kernel,) = report.kernels
    assert kernel.spills == 0
    assert kernel.simulation.mxu_cycles / kernel.simulation.cycles > 0.92


def shared_tiles():
    """The output of groups that share tiles."""

    def multiply(lhs, rhs, sizes):
        return grouped_matmul(lhs, rhs, sizes, preferred_element_type=jnp.bfloat16, platform="pallas")

    sizes = np.array([1500, 300, 1024, 12, 2100, 40, 1800, 1416], np.int32)
    return Workload(function=multiply, args=(shaped((8192, 4096)), shaped((8, 4096, 4096)), sizes))


def test_tiles_shared_by_groups_spill_nothing_on_v7x():
    (report,) = profile_many([Case(label="shared", build=f"{__file__}:shared_tiles")], target="v7x")
    assert report.error is None
    (kernel,) = report.kernels
    assert kernel.spills == kernel.fills == 0


def test_an_exported_grouped_matmul_is_loaded_and_lowered_again():
    made, sizes = RECORDS["bfloat16"], jax.ShapeDtypeStruct((3,), "int32")

    def multiply(lhs, rhs, groups):
        record = GroupedMatmul(lhs=lhs, rhs=rhs, group_sizes=groups, out_dtype=jnp.dtype("float32"), left_over="zero")
        return forward(record, SMALL)[0]

    exported = jax.export.export(jax.jit(multiply), platforms=["tpu"])(made.lhs, made.rhs, sizes)
    loaded = jax.export.deserialize(exported.serialize())
    assert "tpu_custom_call" in compiled(loaded.call, (made.lhs, made.rhs, sizes), "v5e").as_text()
