"""From state files to evidence files."""

import dataclasses
import sys
from types import SimpleNamespace

import pytest

from ejkernel.ops import evidence
from ejkernel_conformance.confirm import merging
from ejkernel_conformance.confirm.listing import SuiteTest
from ejkernel_conformance.confirm.state import Result, Run

TESTS = [
    SuiteTest("test_value[flash-fast-a]", "attention", "fast", "flash", "flash, a"),
    SuiteTest("test_value[flash-fast-b]", "attention", "fast", "flash", "flash, b"),
    SuiteTest("test_vmap[flash-fast-b]", "attention", "fast", "flash", "flash, b"),
    SuiteTest("test_handles[attention-fast-bias]", "attention", "fast", "", "claims of attention"),
    SuiteTest("test_value[scan-fast-a]", "scan", "fast", "scan", "scan, a"),
    SuiteTest("test_value[flash-other-a]", "attention", "other", "flash", "flash, a"),
]
DEVICE = {"platform": "gpu", "vendor": "nvidia", "kind": "NVIDIA H200", "compute_capability": 9.0}
OUTCOMES = {test.id: "passed" for test in TESTS} | {TESTS[1].id: "failed", TESTS[2].id: "refused"}


@pytest.fixture
def digests(tmp_path, monkeypatch):
    """The digests of the sources that there are now, which a test may change; evidence goes to a folder of its own."""
    (tmp_path / "merged").mkdir()
    (tmp_path / "merged/__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    current = {"attention/fast": "a1", "scan/fast": "s1", "attention/other": "o1"}
    shared = {"evidence": "merged:evidence", "backend": "gpu"}
    known = {tuple(key.split("/")): SimpleNamespace(name=key.split("/")[1], **shared) for key in current}
    monkeypatch.setattr(merging, "implementations", lambda: known)
    monkeypatch.setattr(merging, "digests", lambda keys: current)
    yield current
    evidence.shipped.cache_clear()
    sys.modules.pop("merged", None)


def run(results=OUTCOMES, *, jax="0.11.2", at="1", **digests):
    about = {"device": DEVICE, "versions": {"jax": jax, "cuda": "13.0", "driver": "580"}, "at": at}
    about["digests"] = {"attention/fast": "a1", "scan/fast": "s1", "attention/other": "o1"} | digests
    return Run(about, TESTS, {name: Result(outcome, 1.0, "why\nwhere") for name, outcome in results.items()})


def merge(*runs):
    evidence.shipped.cache_clear()
    return merging.merge(runs)


def read(tmp_path, name="fast"):
    return evidence.decode((tmp_path / f"merged/evidence/sm_90/{name}.json").read_bytes())


def test_one_file_for_each_implementation(tmp_path, digests):
    assert sorted(path.name for path in merge(run())) == ["fast.json", "other.json"]
    (found,) = read(tmp_path).confirmations
    assert (found.device, found.versions["driver"], found.at) == ("NVIDIA H200", "580", "1")
    flash = found.families["attention"].operations["flash"]
    assert (flash.passed, flash.refused, flash.failed) == (1, 1, {"test_value[flash-fast-b]": "why"})
    assert found.families["attention"].claims.passed == 1
    assert found.families["scan"].digest == "s1"


def test_what_did_not_run_is_named(tmp_path, digests):
    merge(run({TESTS[0].id: "passed"}))
    (found,) = read(tmp_path).confirmations
    assert found.families.keys() == {"attention"}
    assert found.families["attention"].operations["flash"].not_run == (TESTS[1].id, TESTS[2].id)
    assert found.families["attention"].claims.not_run == (TESTS[3].id,)


def test_runs_of_one_toolchain_are_joined(tmp_path, digests):
    halves = [dict(list(OUTCOMES.items())[:3]), dict(list(OUTCOMES.items())[3:])]
    merge(run(halves[0]), run(halves[1]), run({TESTS[1].id: "passed"}, at="2"))
    (found,) = read(tmp_path).confirmations
    flash = found.families["attention"].operations["flash"]
    assert (flash.passed, flash.failed, flash.not_run, found.at) == (2, {}, (), "2")


def test_a_file_holds_several_toolchains(tmp_path, digests):
    merge(run(jax="0.12.0"))
    merge(run())
    assert [one.versions["jax"] for one in read(tmp_path).confirmations] == ["0.11.2", "0.12.0"]
    merge(run({test.id: "passed" for test in TESTS}, at="3"))
    first, second = read(tmp_path).confirmations
    assert not first.families["attention"].operations["flash"].failed
    assert second.families["attention"].operations["flash"].failed


def test_other_operations_of_the_same_sources_stay(tmp_path, digests):
    merge(run())
    rest = run()
    rest.tests = [dataclasses.replace(TESTS[0], op="more", id="test_value[more-fast-a]")]
    rest.results = {rest.tests[0].id: Result("passed", 1.0)}
    merge(rest)
    (found,) = read(tmp_path).confirmations
    assert found.families["attention"].operations.keys() == {"flash", "more"}
    assert found.families["attention"].claims.passed == 1


def test_results_of_other_sources_do_not_count(tmp_path, digests):
    merge(run(**{"attention/fast": "a0"}))
    (found,) = read(tmp_path).confirmations
    assert found.families.keys() == {"scan"}


def test_changed_sources_make_evidence_stale(tmp_path, digests):
    merge(run())
    digests["attention/fast"] = "a2"
    assert [path.name for path in merge()] == ["fast.json"]
    (found,) = read(tmp_path).confirmations
    assert {family: one.stale for family, one in found.families.items()} == {"attention": True, "scan": False}
    assert merge() == []
    merge(run({test.id: "passed" for test in TESTS}, **{"attention/fast": "a2"}))
    (found,) = read(tmp_path).confirmations
    assert not any(one.stale for one in found.families.values())


def test_sources_as_before_are_confirmed_again(tmp_path, digests):
    merge(run())
    digests["attention/fast"] = "a2"
    merge()
    digests["attention/fast"] = "a1"
    merge()
    assert not any(one.stale for one in read(tmp_path).confirmations[0].families.values())


def test_implementations_that_are_gone_have_no_evidence(tmp_path, digests):
    merge(run())
    del digests["scan/fast"]
    merge()
    assert read(tmp_path).confirmations[0].families.keys() == {"attention"}


def test_a_cpu_interprets_kernels_of_tpus_alone(tmp_path, digests, monkeypatch):
    known = dict(merging.implementations())
    known["attention", "fast"].backend = "tpu"
    on_cpu = run()
    on_cpu.about["device"] = {"platform": "cpu", "kind": "cpu"}
    (path,) = merge(on_cpu)
    assert path == tmp_path / "merged/evidence/tpu/fast.json"
    found = evidence.decode(path.read_bytes())
    assert (found.kind, found.chip, found.confirmations[0].device) == ("interpreted", "tpu", "cpu")
    assert found.confirmations[0].families.keys() == {"attention"}


def test_tests_and_results_are_plain(digests):
    assert [SuiteTest(*dataclasses.astuple(test)) for test in TESTS] == TESTS
