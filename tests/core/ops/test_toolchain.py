"""What a backend cannot run with it refuses, by module and versions; no installer has to take an older JAX for it."""

import importlib.metadata

import pytest

from ejkernel.ops import Requires
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.dispatch import hardware_refusals
from ejkernel.ops.plugins import registry
from ejkernel.ops.toolchain import missing_module_reason, split_requirement

JAX = importlib.metadata.version("jax")


@pytest.fixture(autouse=True)
def forgetful():
    """Nobody remembers what was installed."""
    missing_module_reason.cache_clear()
    yield
    missing_module_reason.cache_clear()


def test_a_module_of_a_wrong_version_is_reported_with_both_versions():
    assert missing_module_reason("jax") is None
    assert missing_module_reason("jax>=0.10") is None
    assert missing_module_reason("jax>=0.1,<0.2") == f"module jax {JAX} is installed, needs >=0.1,<0.2"
    assert missing_module_reason("jax>=99") == f"module jax {JAX} is installed, needs >=99"


def test_a_missing_module_is_reported_by_name():
    assert missing_module_reason("no_such_module") == "module no_such_module is not installed"
    assert missing_module_reason("no_such_module>=2,<3") == "module no_such_module is not installed, needs >=2,<3"


def test_an_untested_jax_version_refuses_all_kernels_but_xla(monkeypatch):
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.13.0" if name == "jax" else real(name))
    needs = {one.name: one.requires.modules for one in registry().implementations["flash_attention"]}
    for name in ("triton", "mosaic_gpu", "mosaic_tpu"):
        assert "module jax 0.13.0 is installed, needs >=0.10,<0.13" in [
            missing_module_reason(module) for module in needs[name]
        ]
    assert needs["xla"] == ()


def test_a_confirmed_hopper_kernel_has_no_hardware_refusals_on_h200():
    (implementation,) = [one for one in registry().implementations["flash_attention"] if one.name == "mosaic_gpu"]
    assert isinstance(implementation.requires, Requires)
    gpu = DeviceInfo(platform="gpu", vendor="nvidia", kind="NVIDIA H200", compute_capability=9.0)
    assert hardware_refusals(implementation, gpu) == ()


def test_a_malformed_module_requirement_raises():
    with pytest.raises(ValueError, match="modules: got '>=3', wants a module"):
        split_requirement(">=3")
