"""What tests of the Triton families share: chips that are not here, and processes in which kernels are interpreted."""

import os
import subprocess
import sys
from pathlib import Path

from suite.chips import pair_cases_with_chips
from suite.servers import run_pytest, run_script

from ejkernel.ops import chips
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.plugins import registry
from ejkernel_triton import ahead

CHIPS = {
    "sm_80": DeviceInfo(platform="gpu", vendor="nvidia", kind="NVIDIA A100", compute_capability=8.0),
    "sm_90": DeviceInfo(platform="gpu", vendor="nvidia", kind="NVIDIA H200", compute_capability=9.0),
    "sm_100": DeviceInfo(platform="gpu", vendor="nvidia", kind="NVIDIA B200", compute_capability=10.0),
    "sm_120": DeviceInfo(platform="gpu", vendor="nvidia", kind="NVIDIA RTX 5090", compute_capability=12.0),
    "gfx942": DeviceInfo(platform="gpu", vendor="amd", kind="AMD Instinct MI300X"),
}
# Triton's interpreter is chosen when it is imported.
INTERPRETED = {"TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu"}
SUITE = ("--pyargs", "ejkernel_conformance", "-q", "-p", "no:cacheprovider")
H200 = CHIPS["sm_90"]


def on_chips(cases, chips=tuple(CHIPS)):
    """Pairs of a case and a chip in which each appears: every case has the H200, and one of the other chips in turn."""
    return pair_cases_with_chips(cases, chips, ["sm_90"])


def assert_fits(calls, chip):
    """Checks that every launch compiles for the chip without miscompiled shifts and fits its shared memory."""
    for call in calls:
        took = ahead.compile_for_chip(call, chip)
        assert took.shared_memory_bytes <= chips.GPUS[chip].shared_memory, (took.kernel, took.shared_memory_bytes)
        assert not ahead.miscompiled_shifts(took.assembly), took.kernel


def assert_fits_and_spills_nothing(calls, chip):
    """The same, and all values stay in registers."""
    for call in calls:
        took = ahead.compile_for_chip(call, chip)
        assert took.binary[:4] == b"\x7fELF"
        assert took.spilled_bytes == 0, (took.kernel, took.registers, took.spilled_bytes)
        assert took.shared_memory_bytes <= chips.GPUS[chip].shared_memory, (took.kernel, took.shared_memory_bytes)
        assert not ahead.miscompiled_shifts(took.assembly), took.kernel


def assert_conforms(operations, selection, implementation="triton", *, serves_all=True):
    """The conformance suite passes for operations where kernels are interpreted.

    Args:
        operations: Names; none for all that the implementation serves.
        selection: Which tests, as pytest's `-k` takes it.
        implementation: Name.
        serves_all: Whether a selected test that dispatch refuses to serve fails; else it is left out.
    """
    arguments = [
        *SUITE,
        f"--ejk-refused={'fail' if serves_all else 'leave-out'}",
        "--ejk-impl",
        implementation,
        *(f"--ejk-op={name}" for name in operations),
        "-k",
        selection,
    ]
    ran = run_pytest(arguments, **INTERPRETED)
    assert ran.returncode == 0, ran.stdout[-3000:]
    assert " passed" in ran.stdout
    return ran.stdout


def assert_covers(*transforms):
    """The covering design of the suite passes for some transforms of all Triton kernels, interpreted in one process."""
    every = {i for listed in registry().implementations.values() for i in map(_name_and_platform, listed)}
    names = sorted(name for name, platform in every if platform == "triton")
    arguments = [*SUITE, "--ejk-cover=first", *(f"--ejk-impl={name}" for name in names)]
    ran = run_pytest([*arguments, *(f"--ejk-transform={transform}" for transform in transforms)], **INTERPRETED)
    assert ran.returncode == 0, ran.stdout[-3000:]
    assert " passed" in ran.stdout


def _name_and_platform(implementation):
    return implementation.name, implementation.platform


def run_interpreted(script, **variables):
    """What a script of this folder, named by its path in it, prints where kernels are interpreted."""
    path = Path(__file__).parent / script
    if variables:  # a process that no other test could use
        environment = {**os.environ, **INTERPRETED, **variables}
        command = [sys.executable, path]
        ran = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900, check=False)
    else:
        ran = run_script(path, **INTERPRETED)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return ran.stdout
