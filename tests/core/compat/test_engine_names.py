"""Names and parameters of the engine and of its helpers that code written for upstream uses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.compat.benchmarks import Benchmark
from ejkernel.loggings import ProgressLogger
from ejkernel.modules import GroupedMatmul
from ejkernel.modules.base import detect_platform
from ejkernel.ops import (
    AutotunePolicy,
    ConfigSelectorChain,
    Executor,
    Invocation,
    Kernel,
    Measurement,
    PersistentCache,
    Tuner,
    device_fingerprint,
    get_device_platform,
    short_hash,
    stable_json,
)
from ejkernel.ops.core import _get_platform_method, _has_custom_vjp
from ejkernel.ops.utils import abstractify, default_key_builder_with_sharding, from_json, to_json
from ejkernel.quantization import dequantize, quantize
from ejkernel.quantization.quantized_array import dense_quantized_matmul, prepack_quantized_array, quantize_array
from ejkernel.utils import assert_close, get_err_ratio, make_mesh, next_power_of_2

X = jnp.arange(8.0)


def test_parameters_have_upstreams_names_and_order():
    assert next_power_of_2(x=5) == 8
    assert make_mesh(mesh_axis=(1, 1, 1, -1)).shape["sp"] == jax.device_count()
    assert AutotunePolicy(True, False, "autotune", False).validate_backward is False
    assert (Tuner(3, 7).warmup_iterations, Tuner(warmup=3, iters=7).timing_iterations) == (3, 7)
    assert Measurement(cfg=1, seconds=0.5) == Measurement(1, 0.5)
    assert Measurement(1, 0.5).part == 1
    assert device_fingerprint(dev=jax.devices()[0]) == device_fingerprint()
    assert get_device_platform(dev=None) == "cpu"
    assert short_hash(obj={"a": 1}) == short_hash(stable_json(obj={"a": 1}))
    assert ConfigSelectorChain(None, None, None, None, False, None, True).forbid_reautotune
    assert GroupedMatmul(version=3).op_id == GroupedMatmul(2).op_id == "grouped_matmul"
    with pytest.raises(ValueError, match="version: got 4"):
        GroupedMatmul(4)


def test_an_invocation_has_upstreams_fields():
    inv = Invocation("flash_attention", (X,), {}, (0,), None, False, "shard_map", check_vma=True)
    assert (inv.batch_axes, inv.stamp, inv.method, inv.check_vma) == ((0,), False, "shard_map", True)
    assert inv.make_key(lambda call: call.op_id) == "flash_attention"


def test_a_store_is_named_by_its_operation_or_by_a_path(tmp_path, monkeypatch):
    monkeypatch.setenv("EJKERNEL_PERSISTENT_CACHE_DIR", str(tmp_path))
    assert PersistentCache("flash-attn").path == tmp_path / "flash-attn.json"
    assert PersistentCache(opname="flash-attn", path=tmp_path / "x.json").path == tmp_path / "x.json"
    assert PersistentCache(str(tmp_path / "y.json")).path == PersistentCache(tmp_path / "y.json").path
    with pytest.raises(NotImplementedError, match="loader, dumper"):
        PersistentCache("flash-attn", loader=dict)


def test_a_preferred_toolchain_is_detected_where_it_runs():
    assert detect_platform("flash_attention", prefer_triton=True, prefer_tilelang=True) == "xla"
    assert detect_platform("flash_attention", "auto", True) == "xla"


class Mine(Kernel):
    def run_gpu(self, x, *, cfg):
        return x

    def run(self, x, *, cfg):
        return x + 1

    def heuristic_cfg(self, inv):
        return None

    def vjp_gpu(self, residuals, dy, x, *, cfg):
        return (dy,)

    def fwd_with_residuals(self, x, *, cfg):
        return x, None


def test_the_most_specific_platform_method_of_a_kernel_is_found():
    kernel = Mine()
    assert _get_platform_method(kernel, "run", "gpu") == kernel.run_gpu
    assert _get_platform_method(kernel, "run", "cpu", "shard_map") == kernel.run
    assert _get_platform_method(kernel, "candidate_cfgs", "gpu") is None
    assert _has_custom_vjp(kernel, "gpu")
    assert not _has_custom_vjp(kernel, "cpu")


class Keyed(Mine):
    key_builder = staticmethod(lambda inv: f"{inv.op_id} anything")

    def candidate_cfgs(self, inv):
        return 1, 2


def test_a_key_builder_decides_what_shares_a_configuration():
    chain = ConfigSelectorChain(policy=AutotunePolicy(cache_miss_fallback="autotune"), tuner=Tuner(0, 1))
    executor = Executor(chain)
    executor(Keyed(), X)
    executor(Keyed(), X[:4])
    assert chain.cache.size() == 1


def test_a_tuner_chooses_the_function_that_is_fastest():
    def make(size):
        if size == 3:
            raise ValueError("does not run")
        return jax.jit(lambda x, scale: x * scale)

    assert Tuner(0, 1).autotune(make, (X,), {"scale": 2.0}, (3, 4)) == 4


def test_abstractify_keys_json_and_error_helpers():
    shapes = abstractify({"x": X, "n": 1})
    assert (shapes["x"].shape, shapes["n"]) == ((8,), 1)
    first, second = (default_key_builder_with_sharding(Invocation("a", (x,))) for x in (X, X[:4]))
    assert first != second
    assert from_json(to_json({"a": [1]})) == {"a": [1]}
    assert get_err_ratio(X, X) == 0
    assert_close("same", X, X, 1e-3)
    with pytest.raises(AssertionError, match="other: error ratio"):
        assert_close("other", X, X + 1, 1e-3)


def test_quantised_weights_as_one_object():
    w, x = jax.random.normal(jax.random.key(0), (64, 96)), jnp.ones((3, 96))
    for axis, make in (("row", quantize_array), ("col", lambda *a: quantize_array(*a, axis="col"))):
        packed = make(w, 32, 8)
        np.testing.assert_array_equal(packed.dequantize(), dequantize(*quantize(w, 32, 8, axis=axis), 32, 8, axis=axis))
        np.testing.assert_allclose(packed.matmul(x), x @ packed.dequantize().T, rtol=1e-4, atol=1e-4)
        dense = dense_quantized_matmul(x, *packed.as_tuple(), axis == "col", 32, 8)
        np.testing.assert_allclose(dense, packed.matmul(x), rtol=1e-4, atol=1e-4)
        assert packed.logical_num_values == w.size
        assert packed.actual_bits_per_value == 9
    assert prepack_quantized_array(w, 32, 8, transpose=False).axis == "col"
    leaves, tree = jax.tree.flatten(quantize_array(w, 32))
    assert jax.tree.unflatten(tree, leaves).bits == 4
    np.testing.assert_array_equal(
        dequantize(w_q=leaves[0], scales=leaves[1], zeros=leaves[2], group_size=32).shape, w.shape
    )


def test_a_benchmark_times_functions(tmp_path):
    functions = {"plain": lambda x: x + 1, "double": lambda x: x + x}
    bench = Benchmark(
        functions, [{"n": 4}, {"n": 8}], lambda c: (jnp.ones(c["n"]),), warmup=1, iterations=2, bench_bwd=True
    )
    analysis = bench.run(verbose=False)
    assert set(analysis["mean_ms"]) == set(functions)
    assert len(analysis["winners"]) == 2
    assert all(result.has_backward for result in bench.results)
    bench.save(tmp_path / "results.json")
    assert (tmp_path / "results.json").read_text().count("mean_ms_bwd") == 4


def test_progress_takes_upstreams_arguments():
    progress = ProgressLogger("tuning", logger_instance=None)
    progress.update(1, 2, "flash", bar_width=10, show_eta=False, extra_info="first")
    progress.complete(None, show_time=False)
