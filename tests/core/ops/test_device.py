"""`target_device` takes a known kind by name, and refuses a device that contradicts itself."""

import jax
import jax.numpy as jnp
import pytest

import ejkernel
from ejkernel.modules import flash_attention
from ejkernel.ops import DeviceInfo, current_device, target_device
from ejkernel.ops.device import DEVICES_BY_SHORT_NAME, find_device

QUERY = jax.ShapeDtypeStruct((1, 128, 8, 64), jnp.bfloat16)


@pytest.mark.parametrize("name", DEVICES_BY_SHORT_NAME)
def test_target_device_accepts_names_kinds_and_device_infos(name):
    for device in (name, name.upper(), DEVICES_BY_SHORT_NAME[name].kind, DEVICES_BY_SHORT_NAME[name]):
        with target_device(device):
            assert current_device() == DEVICES_BY_SHORT_NAME[name]


def test_explain_inside_target_device_is_for_that_device():
    with target_device("h200"):
        assert ejkernel.explain(flash_attention, QUERY, QUERY, QUERY).forward.device.kind == "NVIDIA H200"


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        ("h300", "got 'h300', wants one of a100, h100, .*; did you mean 'h100' or 'h200'"),
        (90, "got 90, wants a DeviceInfo or one of"),
        (None, "got None, wants a DeviceInfo or one of"),
        (DeviceInfo(platform="cuda", vendor="nvidia", kind="NVIDIA H200"), "platform is not one of cpu, gpu, tpu"),
        (DeviceInfo(platform="gpu", kind="NVIDIA H200"), "vendor is not 'amd' or 'nvidia', as it must be on platform"),
        (DeviceInfo(platform="gpu", vendor="nvidia", kind="NVIDIA H200"), "needs compute_capability=, for example 9.0"),
        (DeviceInfo(platform="tpu", vendor="nvidia", kind="TPU v4"), "vendor is not 'google'"),
        (DeviceInfo(platform="cpu", compute_capability=9.0), "compute_capability is not None"),
    ],
)
def test_unknown_target_devices_are_refused_with_a_list_of_kinds(device, reason):
    with pytest.raises(ValueError, match=reason) as raised, target_device(device):
        pass
    assert "a100, h100, h200, b200, mi300x, v5e, v5p, v6e, v7x, cpu" in str(raised.value)


def test_target_device_accepts_a_jax_device():
    assert find_device(current_device()) == current_device()
