"""`ejkernel_conformance.confirm`: every test runs, whatever the others do to their process."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from ejkernel.ops.plugins import registry
from ejkernel_conformance.confirm.listing import SuiteTest, functions, list_tests, make_units, resolve
from ejkernel_conformance.confirm.runner import Pool, Queue, Settings, plan_passes
from ejkernel_conformance.confirm.state import Result, Run, Writer, known_results, read

WORKER = (str(Path(__file__).parent / "confirm_worker.py"),)


def make_tests(*names, op="op", implementation="triton", unit="op, case"):
    return [SuiteTest(name, "family", implementation, op, unit) for name in names]


def run(tests, folder, *, first=(), processes=1, seconds=60.0, longest=30.0):
    until = time.time() + seconds
    settings = Settings(processes=processes, until=until, longest=longest, logs=folder, program=WORKER)
    pool, writer = Pool(settings), Writer(folder / "state.jsonl")
    this = Run(about("a"), tests)
    writer.begin(this)
    try:
        return pool.run(Queue(plan_passes(tests, first)), writer)
    finally:
        pool.close()
        writer.close()


def about(digest, jax="0.11.2", kind="NVIDIA H200"):
    return {"device": {"kind": kind}, "versions": {"jax": jax}, "digests": {"family/triton": digest}}


def test_a_crash_fails_one_test_alone(tmp_path):
    tests = make_tests("first", "crashes", "after the crash", "loses the device", "after the loss", "is refused")
    results = run(tests, tmp_path)
    assert list(results) == [test.id for test in tests]
    assert [result.outcome for result in results.values()] == [
        "passed", "failed", "passed", "failed", "passed", "refused",
    ]  # fmt: skip
    assert results["crashes"].message == "crash: the process ended with signal 11"
    processes = {name: results[name].message for name in ("first", "after the crash", "after the loss")}
    assert len(set(processes.values())) == 3


def test_a_test_that_hangs_is_ended(tmp_path):
    results = run(make_tests("hangs", "next"), tmp_path, longest=2.0)
    assert [result.outcome for result in results.values()] == ["failed", "passed"]
    assert "took too long" in results["hangs"].message


def test_what_the_time_cuts_has_no_result(tmp_path, monkeypatch):
    monkeypatch.setattr("ejkernel_conformance.confirm.runner.GRACE", 0.0)
    assert list(run(make_tests("first", "hangs", "next"), tmp_path, seconds=3.0)) == ["first"]
    (state,) = read([tmp_path / "state.jsonl"])
    assert list(state.results) == ["first"]


def test_all_processes_take_part_and_nothing_runs_twice(tmp_path):
    tests = [t for n in range(40) for t in make_tests(f"test {n}", f"crashes {n}", op=f"op{n % 7}", unit=f"op, {n}")]
    results = run(tests, tmp_path, processes=3)
    assert results.keys() == {test.id for test in tests}
    (state,) = read([tmp_path / "state.jsonl"])
    assert state.results == results


def test_named_implementations_come_first(tmp_path):
    late, soon = (make_tests(name, implementation=name, unit="op, case") for name in ("cuda", "triton"))
    claims = make_tests("claim", op="", unit="claims of family")
    passes = plan_passes([*late, *soon, *claims], ["triton"])
    assert [[test.id for unit in units for test in unit.tests] for units in passes] == [["claim", "triton"], ["cuda"]]
    assert list(run([*late, *soon, *claims], tmp_path, first=["triton"])) == ["claim", "triton", "cuda"]


def test_known_results_are_of_the_same_sources_and_toolchain():
    tests = make_tests("t1", "t2")
    now = Run(about("a"), tests)
    first = Run(about("a"), tests, {"t1": Result("failed", 1.0), "t2": Result("passed", 1.0)})
    again = Run(about("a"), tests, {"t1": Result("passed", 1.0)})
    others = [about("b"), about("a", jax="0.12.0"), about("a", kind="NVIDIA H100 80GB HBM3")]
    strangers = [Run(each, tests, {"t1": Result("failed", 1.0), "t2": Result("failed", 1.0)}) for each in others]
    assert known_results(now, [*strangers, first, *strangers, again, *strangers]) == {
        "t1": Result("passed", 1.0),
        "t2": Result("passed", 1.0),
    }


def test_a_state_file_may_end_anywhere(tmp_path):
    path, tests = tmp_path / "state.jsonl", make_tests("t1", "t2")
    writer = Writer(path)
    writer.begin(Run(about("a"), tests))
    writer.result("t1", Result("passed", 1.0))
    writer.result("t2", Result("passed", 1.0))
    writer.close()
    path.write_bytes(path.read_bytes()[:-9])
    (found,) = read([path])
    assert (found.about, found.tests, list(found.results)) == (about("a"), tests, ["t1"])
    path.write_text('{"entries": 1}')
    with pytest.raises(ValueError, match="does not begin with a run"):
        list(read([path]))


def test_lists_what_pytest_collects():
    # Those that dispatch refuses are listed too: they are part of the evidence.
    options = ["--ejk-impl=xla", "--ejk-op=mean_pooling", "--ejk-refused=fail"]
    command = [sys.executable, "-m", "pytest", "--pyargs", "ejkernel_conformance", "--collect-only", "-q", *options]
    collected = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    ids = {line.partition("::")[2] for line in collected if "::" in line}
    tests = list(list_tests(("xla",), ("mean_pooling",)))
    assert len(tests) == len(ids) > 20
    assert {test.id for test in tests} == ids
    assert [unit.long for unit in make_units(tests)] == sorted((unit.long for unit in make_units(tests)), reverse=True)
    assert {test.op for test in tests} == {"mean_pooling", ""}


def test_a_listed_test_is_the_suites():
    test = next(test for test in list_tests(("xla",), ("mean_pooling",)) if test.id.startswith("test_shapes["))
    function, parameter = resolve(test)
    assert function is functions()["test_shapes"][1]
    function(parameter)


def test_cases_of_an_implementation_have_names_of_their_own():
    found = registry()
    for op, implementations in found.implementations.items():
        for implementation in implementations:
            names = [case.name for case in (*found.ops[op].cases, *implementation.cases_of(found.ops[op]))]
            assert len(set(names)) == len(names), f"{op}, {implementation.name}: {sorted(names)}"
