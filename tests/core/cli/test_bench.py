"""`ejkernel bench`."""

import importlib.util
import json

import pytest
from click.testing import Result

from ejkernel.ops import registry

SMALL = ("flash_attention", "--shape", "1,64,2,16", "--repeat", "2", "--no-baselines")
OTHERS = """
import dataclasses
import jax
from ejkernel.ops import hookimpl
from ejkernel_xla.tiled_attention import IMPLEMENTATIONS, backward, forward

def slightly_wrong(record, config):
    output, residuals = forward.forward(record, config)
    return output + 0.01, residuals

def wrong_gradient(pullback, config):
    return {**(got := backward.backward(pullback, config)), "key": 1.01 * got["key"]}

def too_large(record, config):
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of shared memory")

@hookimpl
def ejkernel_implementations():
    base = dataclasses.replace(IMPLEMENTATIONS[0], backward=None, priority=-1)
    return [
        dataclasses.replace(base, name="forward_only"),
        dataclasses.replace(base, name="wrong", forward=f"{__name__}:slightly_wrong"),
        dataclasses.replace(base, name="steep", backward=f"{__name__}:wrong_gradient"),
        dataclasses.replace(base, name="large", forward=f"{__name__}:too_large"),
    ][WHICH]
"""


def verdicts(result: Result) -> dict[tuple[str, str], str]:
    """How each pass of each implementation compared with the reference."""
    timings = json.loads(result.stdout)["timings"]
    return {(t["passes"], t["implementation"]): t["check"]["text"] for t in timings}


def test_every_implementation_is_checked_and_timed_forward_and_backward(run, install):
    install("forward_backend", OTHERS.replace("WHICH", "0:1"))
    found = verdicts(run("bench", *SMALL, "-o", "causal=true", "--json"))
    passes = ("forward", "forward + backward")
    wanted = {("forward", "xla"), ("forward", "forward_only"), (passes[1], "xla"), (passes[1], "forward_only + xla")}
    assert set(found) == wanted
    assert all(text.startswith("agrees, largest error") for text in found.values())


@pytest.mark.parametrize(
    ("which", "name", "passes"),
    [("1:2", "wrong", "forward"), ("2:3", "steep", "forward + backward")],
)
def test_a_wrong_kernel_is_caught_and_fails_the_command(run, install, which, name, passes):
    install(f"{name}_backend", OTHERS.replace("WHICH", which))
    found = verdicts(run("bench", *SMALL, "--json", status=1))
    assert found[passes, name].startswith("DIFFERS")
    assert found[passes, "xla"].startswith("agrees")


def test_a_kernel_that_does_not_run_is_reported_and_the_others_are_timed(run, install):
    install("large_backend", OTHERS.replace("WHICH", "3:4"))
    found = verdicts(run("bench", *SMALL, "--json", status=1))
    assert "RESOURCE_EXHAUSTED" in found["forward", "large"]
    assert found["forward", "xla"].startswith("agrees")


def test_a_reference_too_large_to_run_is_reported_as_skipped(run, monkeypatch):
    monkeypatch.setattr("ejkernel.cli.check.REFERENCE_LIMIT_BYTES", 0)
    found = verdicts(run("bench", *SMALL, "--json"))
    assert all(text.startswith("skipped: the reference needs") for text in found.values())


def test_the_plot_of_cases_has_a_panel_for_each_pass(run, tmp_path):
    plot = tmp_path / "times.png"
    output = run("bench", "flash_attention", "--case", "one token", "--case", "causal", "--plot", str(plot)).output
    assert "flash_attention: one token" in output
    assert "flash_attention: causal" in output
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_without_shapes_the_benchmark_cases_run(run, monkeypatch):
    asked: list[str] = []
    monkeypatch.setattr("ejkernel.cli.bench._time_programs", lambda call, settings, out: asked.append(call.label) or [])
    run("bench", "flash_attention", status=1)
    assert asked == ["small model"]


def test_a_plot_that_cannot_be_written_is_one_line_after_the_table(run, tmp_path):
    plot = tmp_path / "missing" / "times.png"
    result = run("bench", *SMALL, "--no-baselines", "--repeat", "1", "--plot", str(plot), status=1)
    assert f"Error: --plot: {plot} cannot be written" in result.output


def test_plotting_without_matplotlib_says_what_to_install(run, monkeypatch, tmp_path):
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "matplotlib" else find(name))
    output = run("bench", *SMALL, "--plot", str(tmp_path / "x.png"), status=2).output
    assert "pip install 'ejkernel-core[plot]'" in output


def test_a_call_without_implementation_fails_with_the_reasons(run):
    assert "platform='triton' was asked for" in run("bench", *SMALL, "--platform", "triton", status=1).output


def test_operations_without_gradients_are_timed_forward(run):
    case = registry().op("page_attention").cases[0].name
    assert {passes for passes, _ in verdicts(run("bench", "page_attention", "--case", case, "--json"))} == {"forward"}
