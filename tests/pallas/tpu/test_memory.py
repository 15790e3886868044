"""What TPU kernels ask of VMEM and SMEM, computed before compilation, next to limits and the compiler's figures."""

import dataclasses
import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType

from ejkernel.ops.chips import TPUS
from ejkernel.ops.device import DeviceInfo, target_device
from ejkernel_pallas.tpu.mosaic import launch as launches
from ejkernel_pallas.tpu.mosaic.launch import KernelCall, Operand, launch
from ejkernel_pallas.tpu.profile import Case, profile_many

WORKLOADS = Path(__file__).parents[3] / "benchmarks" / "library" / "_tpu_ours.py"
ATTENTION, SELECTED = "ejkernel_attention", "ejkernel_selected_attention"
RING, CONVOLUTION, SCAN = "ejkernel_ring", "ejkernel_causal_convolution_causal_conv", "ejkernel_selective_scan"
RECURRENCE, GROUPED = "ejkernel_linear_recurrence", "ejkernel_grouped_matmul"
KERNELS = (
    ("attention", {"gradient": True}, (f"{ATTENTION}_forward", f"{ATTENTION}_backward_keys")),
    ("selected_blocks", {"gradient": True}, (f"{SELECTED}_fwd", f"{SELECTED}_bwd_dq", f"{SELECTED}_bwd_dkdv")),
    ("convolution", {"gradient": True}, (f"{CONVOLUTION}_fwd", f"{CONVOLUTION}_bwd")),
    ("convolution_steps", {"tokens": 8}, (f"{CONVOLUTION}_update",)),
    ("scan", {"gradient": True}, (f"{SCAN}_selective_scan_fwd", f"{SCAN}_selective_scan_bwd")),
    ("scan_steps", {}, (f"{SCAN}_selective_state_update",)),
    ("recurrence", {"kind": "KDA", "gradient": True}, (f"{RECURRENCE}_chunk_fwd", f"{RECURRENCE}_chunk_bwd")),
    ("recurrent_steps", {"kind": "KDA"}, (f"{RECURRENCE}_recurrent_step",)),
    ("pages", {"queries": 512}, ("paged_attention",)),
    ("experts", {}, (GROUPED,)),
    ("experts", {"of": "lhs"}, (f"{GROUPED}_backward_rows",)),
    ("experts", {"of": "rhs"}, (f"{GROUPED}_backward_matrices",)),
    ("gated_experts", {"columns": 768}, ("ejkernel_gated_grouped_matmul",)),
    ("selected_keys", {"keys": 131072}, ("ejkernel_lightning_indexer",)),
    ("selected_keys_decode", {"keys": 131072, "queries": 8}, ("ejkernel_lightning_indexer_decode",)),
    ("listed_blocks_decode", {"keys": 32768, "window": 512}, (f"{SELECTED}_decode",)),
    ("listed_keys", {"keys": 32768, "latent": True}, ("ejkernel_token_sparse_attention",)),
    ("listed_union", {"keys": 131072}, ("ejkernel_token_sparse_attention_union",)),
    ("quantised", {"m": 16}, ("ejkernel_quantized_matmul_over_rows",)),
    ("quantised", {"m": 16, "transpose": True}, ("ejkernel_quantized_matmul_over_words",)),
    ("latent_dense", {"heads": 128}, ("paged_attention",)),
    ("ring", {"devices": 8, "gradient": True}, (f"{RING}_forward_remote", f"{RING}_backward_remote")),
    ("collective", {"kind": "reduce-scatter"}, ("ejkernel_reduce_scatter_matmul",)),
    (
        "collective",
        {"kind": "gradient of the weight"},
        ("ejkernel_all_gather_matmul", "ejkernel_collective_weight_gradient"),
    ),
)
"""Workloads of the static benchmarks, and the kernels of one device that they run."""
COMPILED = (("convolution", {}, f"{CONVOLUTION}_fwd"), ("pages", {"queries": 1}, "paged_attention"))


def workload(build, kwargs):
    """A workload of the module of benchmarks, which is no package."""
    module = sys.modules.get("_tpu_workloads")
    if module is None:
        spec = importlib.util.spec_from_file_location("_tpu_workloads", WORKLOADS)
        module = sys.modules["_tpu_workloads"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return getattr(module, build)(**kwargs)


def memory_by_kernel(made, kind):
    """VMEM, SMEM and the limit of VMEM of the kernels that a workload launches for a kind of device; none of them is
    traced.
    """
    found, check = {}, launches.check_memory

    def record(call):
        check(call)
        found[call.name] = (*dataclasses.astuple(launches.memory_of(call)), call.vmem_limit)

    def without_kernel(kernel, *, out_shape, **_):
        return lambda *arrays: [jnp.zeros(x.shape, x.dtype) for x in out_shape]

    shapes_only = SimpleNamespace(**{**vars(launches.pl), "pallas_call": without_kernel})
    axes, sizes = zip(*made.mesh_axes.items(), strict=True)
    mesh = AbstractMesh(sizes, axes, axis_types=(AxisType.Auto,) * len(axes))
    jax.clear_caches()
    with (
        jax.sharding.use_abstract_mesh(mesh),
        target_device(DeviceInfo(platform="tpu", vendor="google", kind=kind)),
        mock.patch.object(launches, "check_memory", record),
        mock.patch.object(launches, "pl", shapes_only),
    ):
        jax.eval_shape(made.function, *made.args)
    jax.clear_caches()  # nothing else may find these traces
    return found


@pytest.mark.whole
@pytest.mark.parametrize(("build", "kwargs", "names"), KERNELS, ids=[names[-1] for *_, names in KERNELS])
def test_blocks_and_tables_fit_memory(build, kwargs, names):
    chip = TPUS["v5p"]  # the one with the least VMEM
    memory = memory_by_kernel(workload(build, kwargs), chip.kind)
    assert set(names) <= memory.keys()
    for vmem, smem, vmem_limit in memory.values():
        assert 0 < vmem <= 48 * 2**20
        assert smem <= 2**19
        # Pipelines within kernels, of rings and collective products, have their blocks in what the limit adds.
        assert vmem <= vmem_limit <= chip.vmem


@pytest.mark.needs("libtpu")
@pytest.mark.parametrize(("build", "kwargs", "name"), COMPILED, ids=[name for *_, name in COMPILED])
def test_the_compiler_takes_as_much_vmem_as_is_computed(build, kwargs, name):
    computed, *_ = memory_by_kernel(workload(build, kwargs), "TPU v5 lite")[name]
    (report,) = profile_many([Case(label=name, build=f"{WORKLOADS}:{build}", kwargs=kwargs)], target="v5e")
    compiled = next(kernel.vmem_bytes for kernel in report.kernels if name in kernel.name)
    assert 0.8 * compiled <= computed <= 1.1 * compiled


def call(block, table):
    """A kernel with one block of float32 and a table of so many entries."""
    x = Operand(jnp.zeros(block, jnp.float32), block)
    tables = {"table": jax.ShapeDtypeStruct((table,), jnp.int32)}
    return KernelCall(
        name="copy", kernel=print, refs=dict, scalar_tables=tables, inputs={"x": x}, outputs={"y": x}, scratch={}
    )


@pytest.mark.parametrize(("sizes", "memory"), [(((4096, 4096), 8), "VMEM"), (((8, 128), 2**18 + 1), "SMEM")])
def test_kernels_that_do_not_fit_memory_are_refused_by_name(sizes, memory):
    with pytest.raises(ValueError, match=f"copy: got blocks and tables of .* bytes of {memory}, wants at most"):
        launch(call(*sizes))
