"""`ejkernel doctor` on toolchains: which kernels of GPUs are confirmed with the installed one and with those of pip."""

import json
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from ejkernel.cli import main, toolchains
from ejkernel.ops import DeviceInfo, Implementation, Requires, evidence
from ejkernel.ops.evidence import Confirmation, EvidenceFile, FamilyEvidence, Tally

H200 = DeviceInfo(platform="gpu", vendor="nvidia", kind="NVIDIA H200", compute_capability=9.0)
NEW, OLD = {"jax": "0.12.0.1", "jax_triton": "0.4.1", "triton": "3.9.0"}, {"jax": "0.11.2", "triton": "3.6.0"}


class Confirmed(Implementation):
    evidence = "package:evidence"


def kernel(name, modules, kind=Confirmed):
    requires = Requires(
        devices=frozenset({"nvidia"}), dtypes=frozenset({"float32"}), handles=frozenset(), modules=modules
    )
    return kind(family="toy", name=name, platform=name, forward="m:f", requires=requires)


@pytest.fixture
def found(monkeypatch):
    kernels = (kernel("triton", ("triton", "jax_triton>=0.3.1,<0.5", "jax<0.13")), kernel("cuda", ()))
    operations = {"one": Tally(passed=3), "two": Tally(passed=3, failed={"test_value[a]": "wrong"})}
    families = {"toy": FamilyEvidence(digest="0", operations=operations)}
    confirmations = {
        "triton": Confirmation(device="NVIDIA H200", versions=NEW, at="1", families=families),
        "cuda": Confirmation(device="NVIDIA H200", versions=OLD, at="1", families=families),
    }
    files = {
        name: (EvidenceFile(implementation=name, chip="sm_90", confirmations=(one,)),)
        for name, one in confirmations.items()
    }
    monkeypatch.setattr(evidence, "shipped", lambda folder, name: files[name])
    monkeypatch.setattr(evidence, "installed_versions", lambda modules: {"jax": "0.13.1", "triton": "4.0"})
    resolved = toolchains.ResolvedVersions(
        date="2026-11-26", versions_by_python={"3.11": {"jax": "0.10.2"}, "3.12": NEW}
    )
    monkeypatch.setattr(toolchains, "resolved_versions", lambda: resolved)
    return SimpleNamespace(implementations={"one": (*kernels, kernel("xla", (), Implementation)), "two": kernels})


@pytest.mark.parametrize("devices", [[H200], [DeviceInfo(platform="cpu")]], ids=["on a GPU", "without a GPU"])
def test_confirmed_kernels_are_listed_by_toolchain(found, devices):
    installed, old, new = toolchains.confirmed_kernels_by_toolchain(found, devices)
    assert (installed.toolchain, installed.chip, installed.versions) == ("installed", "sm_90", "jax 0.13.1, triton 4.0")
    assert installed.unconfirmed_by_reason == {
        "module jax_triton is not installed": {"triton": 2},
        "not confirmed with jax 0.13 on sm_90, but with jax 0.11": {"cuda": 2},
    }
    assert (old.toolchain, old.unconfirmed_by_reason["module triton is not installed"]) == (
        "Python 3.11",
        {"triton": 2},
    )
    assert (new.toolchain, new.confirmed) == ("Python 3.12", {"triton": 1})
    failing = "not confirmed on NVIDIA H200 with jax 0.12.0, jax_triton 0.4.1, triton 3.9.0: some of its tests fail"
    assert new.unconfirmed_by_reason[failing] == {"triton": 1}


def test_kernels_that_refuse_a_version_are_listed_with_the_reason(found, monkeypatch):
    versions = {"jax": "0.14.0", "jax_triton": "0.4.1", "triton": "3.9.0"}
    monkeypatch.setattr(evidence, "installed_versions", lambda modules: versions)
    installed = toolchains.confirmed_kernels_by_toolchain(found, [H200])[0]
    assert installed.unconfirmed_by_reason["jax 0.14.0 is refused, needs <0.13"] == {"triton": 2}


def test_lines_of_the_toolchain_table(found):
    text = "\n".join(
        toolchains.confirmed_kernels_lines(toolchains.confirmed_kernels_by_toolchain(found, [H200]), "2026-11-26")
    )
    assert (
        "  Python 3.12, sm_90: jax 0.12.0.1, jax_triton 0.4.1, triton 3.9.0\n    confirmed, with operations: triton (1)"
        in text
    )
    assert "cuda (2): not confirmed with jax 0.12 on sm_90, but with jax 0.11" in text


def test_toolchains_are_not_listed_without_kernels_for_gpus(found):
    found.implementations = {"one": (kernel("xla", (), Implementation),)}
    rows = toolchains.confirmed_kernels_by_toolchain(found, [DeviceInfo(platform="cpu")])
    (line,) = toolchains.confirmed_kernels_lines(rows, "2026-11-26")
    assert line == "Kernels for GPUs: none, as no installed backend but XLA has any"


def test_the_command_prints_what_pip_installs():
    runner, versions = CliRunner(), toolchains.resolved_versions()
    printed = runner.invoke(main, ["doctor"]).output
    for python, modules in versions.versions_by_python.items():
        assert f"Python {python}, sm_90: jax {modules['jax']}" in printed
    shown = json.loads(runner.invoke(main, ["doctor", "--json"]).output)["toolchains"]
    assert [one["what"] for one in shown][:2] == ["installed", "Python 3.11"]
