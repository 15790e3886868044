"""`ejkernel explain --target`: the decision for a device that need not be in this machine."""

import json
from pathlib import Path

import pytest
from distributions import add_distribution

CALL = ("explain", "flash_attention", "--shape", "1,128,8,64", "--dtype", "bfloat16")

OFFERS = """
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.execution.target import Target

def targets():
    return {"abacus": Target(device=DeviceInfo(platform="cpu", kind="a wooden abacus"), tuner=None)}
"""


@pytest.mark.parametrize(
    ("target", "implementation"),
    [("h200", "mosaic_gpu"), ("NVIDIA H200", "mosaic_gpu"), ("V6E", "mosaic_tpu"), ("cpu", "xla")],
)
def test_the_decision_is_that_of_the_target(run, target, implementation):
    found = json.loads(run(*CALL, "--target", target, "--json").stdout)
    assert found["forward"]["implementation"] == implementation


def test_the_table_names_the_target(run):
    assert "flash_attention, forward, on NVIDIA H200 (sm_90)" in run(*CALL, "--target", "h200").output


def test_an_unknown_target_lists_the_kinds(run):
    output = run(*CALL, "--target", "h300", status=2).output
    assert "got 'h300', there are a100, h100, h200" in output
    assert "v6e" in output
    assert "did you mean 'h100' or 'h200'?" in output


def test_a_target_of_another_distribution_can_be_named(run, tmp_path, monkeypatch):
    entry_point = "[ejkernel.targets]\nabacus = abacus_targets:targets"
    add_distribution(monkeypatch, tmp_path, Path("abacus_targets.py"), OFFERS, entry_point)
    assert "on a wooden abacus" in run(*CALL, "--target", "abacus").output
    assert "abacus" in run(*CALL, "--target", "quipu", status=2).output
