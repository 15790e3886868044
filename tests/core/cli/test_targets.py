"""Distributions that offer targets for `ejkernel tune --target`."""

from pathlib import Path

import pytest
from distributions import add_distribution

SMALL = ("tune", "flash_attention", "--shape", "1,64,2,16")


@pytest.fixture
def offer(tmp_path, monkeypatch):
    """Makes a module a distribution with targets."""

    def installed(module, source):
        entry_point = f"[ejkernel.targets]\n{module} = {module}:targets"
        add_distribution(monkeypatch, tmp_path, Path(f"{module}.py"), source, entry_point)

    return installed


GUESSES = """
from ejkernel.ops.config.measurement import Measurement, TuningResult
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.execution.target import Target

class Guesses:
    def tune(self, request, argument):
        part = request.heuristic()
        return TuningResult(request.key(), request.implementation.name, (Measurement(part, 0.001),), request.kind())

def targets():
    device = DeviceInfo(platform="cpu", kind="abacus")
    return {"abacus": Target(device=device, tuner=lambda show_progress: Guesses())}
"""


def test_a_distribution_can_offer_a_device(run, offer, store):
    offer("guessing_backend", GUESSES)
    output = run(*SMALL, "--target", "abacus").output
    assert "flash_attention, backward, xla predicted for abacus" in output
    assert not store.exists()
    assert "abacus" in store.with_suffix(".predicted.json").read_text()


def test_a_distribution_that_does_not_load_is_named_for_a_missing_target(run, offer):
    offer("broken_targets", "raise RuntimeError('no beads')")
    output = run(*SMALL, "--target", "abacus", status=2).output
    assert "got 'abacus'" in output
    assert "broken_targets" in output
    assert "no beads" in output
