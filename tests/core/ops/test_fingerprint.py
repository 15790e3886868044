"""Fingerprints, names of platforms, the view of the registry, and the small compiled-call helpers."""

import dataclasses
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel
from ejkernel import Backend, EjkernelRuntimeError, Platform, kernel_registry
from ejkernel.callib import cdiv, ejit, next_power_of_2, strides_from_shape
from ejkernel.errors import NoImplementationError
from ejkernel.modules import flash_attention
from ejkernel.modules.base import create_default_executor, detect_platform
from ejkernel.ops import device_fingerprint, device_kind, get_device_platform, short_hash, stable_json
from ejkernel.xla_utils import get_corrected_named_sharding, reorder_sequence

X = jnp.ones((1, 4, 2, 8))


def test_device_fingerprint_is_the_device_kind_and_platform():
    assert get_device_platform() == get_device_platform(jax.devices()[0]) == "cpu"
    assert device_fingerprint() == f"{device_kind()}|cpu"


def test_stable_json_is_equal_for_equal_values():
    @dataclasses.dataclass
    class Pair:
        b: int
        a: float

    assert stable_json({"b": 1, "a": (2, None)}) == stable_json({"a": [2, None], "b": 1}) == '{"a":[2,null],"b":1}'
    assert stable_json(Pair(1, 2.5)) == '{"a":2.5,"b":1}'
    assert stable_json(jnp.ones((2, 3))) == stable_json(np.zeros((2, 3), np.float32))
    assert stable_json(jnp.float32) == '"float32"'
    assert short_hash("x") != short_hash("y")
    assert len(short_hash({"x": jnp.ones(2)})) == 16


def test_platform_accepts_enum_members():
    np.testing.assert_array_equal(flash_attention(X, X, X, platform=Platform.XLA), flash_attention(X, X, X))
    assert {"triton", "pallas", "cuda", "xla", "auto"} == set(Platform)
    assert set(Backend) == {"gpu", "tpu", "cpu", "any"}


def test_kernel_registry_lists_algorithms_and_implementations():
    assert "flash_attention" in kernel_registry.list_algorithms()
    specs = kernel_registry.list_implementations("flash_attention")
    priorities = [spec.priority for spec in specs if spec.priority is not None]  # None depends on the call
    assert priorities == sorted(priorities, reverse=True)
    assert {"xla", "triton"} <= {spec.platform for spec in specs}
    assert kernel_registry.get("flash_attention", platform=Platform.XLA)(X, X, X).shape == X.shape
    assert kernel_registry.get("flash_attention") is flash_attention
    with pytest.raises(ValueError, match=r"no implementation of 'mean_pooling' fits .*cuda"):
        kernel_registry.get("mean_pooling", platform="cuda")
    with pytest.raises(ValueError, match="no operation 'flush'"):
        kernel_registry.get("flush")


def test_detect_platform_is_xla_on_cpu_unless_given():
    assert detect_platform("flash_attention") == "xla"
    assert detect_platform("flash_attention", "triton") == "triton"
    assert create_default_executor is ejkernel.ops.create_default_executor


def test_library_errors_are_ejkernel_runtime_errors():
    with pytest.raises(EjkernelRuntimeError) as caught:
        flash_attention(X, X, X, platform="cuda")
    assert isinstance(caught.value, NoImplementationError | NotImplementedError)


def test_ejit_is_jit_bare_or_with_options():
    @ejit
    def one(x):
        return x + 1

    @ejit(static_argnames=("n",), donate_argnums=None)
    def many(x, n):
        return x + n

    assert one(1) == 2
    assert many(1, n=3) == 4
    assert ejit(lambda x, n: x * n, static_argnums=1)(2, 3) == 6
    assert jax.config.jax_compilation_cache_dir is None


def test_upstreams_shape_helpers_keep_their_import_paths():
    assert cdiv(7, 2) == ejkernel.xla_utils.cdiv(7, 2) == 4
    assert next_power_of_2(5) == 8
    assert tuple(strides_from_shape((2, 3))) == (3, 1)


def test_older_argument_names_are_accepted():
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("dp",))
    spec = jax.sharding.PartitionSpec("dp")
    assert get_corrected_named_sharding((4,), spec=spec, mesh=mesh).spec == spec
    x = jnp.arange(8)[None]
    np.testing.assert_array_equal(reorder_sequence(x=x, cp_size=2), reorder_sequence(x, cp_size=2))
    with pytest.raises(TypeError, match="got 'x' and 'tensor', two names of one argument"):
        reorder_sequence(x=x, tensor=x, cp_size=2)


@pytest.mark.parametrize("package", ["ejkernel", "ejkernel.ops.config", "ejkernel.ops.execution", "ejkernel.errors"])
def test_lazily_exported_names_resolve_without_importing_submodules(package):
    script = f"import importlib; m = importlib.import_module({package!r}); print([getattr(m, n) for n in m.__all__])"
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        sys.modules[package].nothing  # noqa: B018
