"""The table of chips: devices find their entry, and the entries are consistent."""

import pytest

from ejkernel.ops import chips
from ejkernel.ops.device import DEVICES_BY_SHORT_NAME, DeviceInfo


def _nvidia(capability):
    return DeviceInfo(platform="gpu", vendor="nvidia", kind="some GPU", compute_capability=capability)


@pytest.mark.parametrize(
    ("capability", "target"), [(8.0, "sm_80"), (9.0, "sm_90"), (12.0, "sm_120"), (12.1, "sm_120"), (7.5, "sm_80")]
)
def test_an_unlisted_gpu_gets_the_limits_of_the_newest_older_chip(capability, target):
    assert chips.gpu_of(_nvidia(capability)).target == target


def test_sm_120_has_the_multiprocessor_count_of_its_largest_product():
    """An RTX PRO 6000 Blackwell has 188 multiprocessors of 128 lanes, 24,064 in all; an RTX 5090 has 170."""
    assert chips.gpu_named("sm_120").multiprocessors == 24064 // 128


@pytest.mark.parametrize("gpu", chips.GPUS.values(), ids=lambda gpu: gpu.target)
def test_shared_memory_per_block_excludes_the_drivers_kilobyte(gpu):
    assert gpu.total_shared_memory - gpu.shared_memory == (1024 if gpu.vendor == "nvidia" else 0)
    assert gpu.capability == (int(gpu.target.removeprefix("sm_")) if gpu.vendor == "nvidia" else 0)


def test_an_unknown_target_is_an_error_that_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"chip: got 'sm_75', wants one of sm_80, .*gfx942"):
        chips.gpu_named("sm_75")


def test_devices_of_the_command_line_are_in_the_table():
    for name, device in DEVICES_BY_SHORT_NAME.items():
        if device.platform == "tpu":
            assert chips.tpu_of(device) is chips.TPUS[name]
        elif device.platform == "gpu":
            assert chips.gpu_of(device).vendor == device.vendor


def test_a_cpu_interprets_gpu_kernels_with_hopper_limits():
    assert chips.gpu_of(DeviceInfo(platform="cpu")).target == "sm_90"
