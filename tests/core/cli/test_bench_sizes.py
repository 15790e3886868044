"""`ejkernel bench` without sizes: what it runs on a CPU, and what it says before it is done."""

import json
import math
import sys
from io import StringIO

import jax
import pytest

from ejkernel.cli import bench
from ejkernel.cli.calls import CallOptions
from ejkernel.cli.progress import format_duration, progress_bar
from ejkernel.ops.plugins import registry

MOST_BYTES = 64 << 20
OPERATIONS = sorted(registry().ops)


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_has_cases_to_time_on_accelerators_and_smaller_ones_on_cpus(name):
    op = registry().ops[name]
    sizes = {}
    for tag in ("bench", "bench_cpu"):
        records = [jax.eval_shape(case.make, jax.random.key(0)) for case in op.cases if tag in case.tags]
        for record in records:
            op.validate(record)
        sizes[tag] = max(sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(r)) for r in records)
    assert sizes["bench_cpu"] < sizes["bench"]
    assert sizes["bench_cpu"] < MOST_BYTES


def spec(name: str) -> CallOptions:
    return CallOptions(
        op=registry().ops[name],
        shapes=(),
        kv_shape=None,
        value_dim=None,
        dtype=None,
        platform=None,
        options=(),
        cases=(),
    )


def test_the_device_decides_which_cases_run(monkeypatch):
    def tag(platform: str) -> str:
        device = type("Device", (), {"platform": platform})()
        monkeypatch.setattr(bench.jax, "devices", lambda: [device])
        return bench._tag(spec("gru"))

    assert [tag(platform) for platform in ("cpu", "gpu", "tpu")] == ["bench_cpu", "bench", "bench"]


def test_the_estimate_comes_before_the_table_and_on_the_standard_error(run):
    result = run("bench", "mean_pooling", "--shape", "1,64,8", "--repeat", "1")
    assert "mean_pooling, x float32[1,64,8]: 4 programs, each timed 1 times" in result.stderr
    assert "this takes about" in result.stderr
    assert result.output.index("this takes about") < result.output.index("against the reference")
    assert "this takes" not in result.stdout


def test_json_output_has_no_other_text(run):
    result = run("bench", "mean_pooling", "--shape", "1,64,8", "--repeat", "1", "--json")
    assert json.loads(result.stdout)["operation"] == "mean_pooling"
    assert result.stderr == ""


@pytest.mark.parametrize("terminal", [True, False])
def test_the_bar_is_shown_on_terminals_only(monkeypatch, terminal):
    stream = StringIO()
    stream.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stderr", stream)
    with progress_bar(3) as step:
        step("compile and check")
        step("time")
        step("time")
    assert ("3/3" in stream.getvalue()) == terminal


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.01, "1 s"), (42.4, "42 s"), (89, "89 s"), (180, "3 min"), (9000, "2.5 h")]
)
def test_durations_are_printed_rounded(seconds, text):
    assert format_duration(seconds) == text
