"""What operators build on: JSON from what finds something out, names that nothing breaks, a quiet stderr."""

import json
import os
import subprocess
import sys
from io import StringIO

import pytest
from click.testing import CliRunner
from rich.console import Console

from ejkernel.cli import main
from ejkernel.cli.tables import print_table, print_unmarked_text
from ejkernel.ops.plugins import registry

SMALL = ("flash_attention", "--shape", "1,64,2,16")
TUNED = ("--repeat", "1", "--direction", "forward")
LONG = "chunked_prefill_paged_decode"
COMMANDS = {
    "doctor": ("doctor",),
    "explain": ("explain", *SMALL),
    "ops": ("ops",),
    "tune": ("tune", *SMALL, *TUNED),
    "cache list": ("cache", "list"),
    "bench": ("bench", *SMALL, "--repeat", "1"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_that_finds_something_out_prints_one_json_document(run, command):
    result = run(*COMMANDS[command], "--json")
    assert isinstance(json.loads(result.stdout), dict | list)
    assert result.stderr == ""


def test_doctor_as_json_says_what_is_missing(run):
    found = json.loads(run("doctor", "--json").stdout)
    assert found["versions"]["ejkernel"] == "0.2.0"
    (triton,) = [one for one in found["operations"]["flash_attention"] if one["name"] == "triton"]
    assert triton["device_here"] is False
    assert {plugin["name"] for plugin in found["plugins"]} >= {"xla"}
    assert found["store"]["entries"] == 0


def test_explain_as_json_is_the_decision(run):
    found = json.loads(run("explain", *SMALL, "--json").stdout)
    assert found["forward"]["implementation"] == "xla"
    assert found["forward"]["tier"] == "heuristics"
    assert found["forward"]["config"]["block_q"] > 0
    refused = [one for one in found["forward"]["verdicts"] if one["status"] == "refused"]
    assert all(one["reasons"] for one in refused)


def test_explain_as_json_still_fails_where_nobody_serves(run):
    found = json.loads(run("explain", *SMALL, "--platform", "triton", "--json", status=1).stdout)
    assert found["forward"]["implementation"] is None


def test_ops_as_json_lists_every_operation(run):
    found = json.loads(run("ops", "--json").stdout)
    assert [one["operation"] for one in found] == sorted(registry().ops)
    (flash,) = [one for one in found if one["operation"] == "flash_attention"]
    (xla,) = [one for one in flash["implementations"] if one["name"] == "xla"]
    assert xla["fields"]["causal"] == "yes"


@pytest.mark.parametrize("width", [80, 40])
@pytest.mark.parametrize("command", ["doctor", "explain", "tune", "cache list", "bench"])
def test_tables_break_no_name_at_any_width(run, monkeypatch, command, width):
    run("tune", *SMALL, *TUNED)
    monkeypatch.setenv("COLUMNS", str(width))
    shown = CliRunner().invoke(main, COMMANDS[command]).output
    wanted = {"doctor": LONG, "explain": "mosaic_tpu", "cache list": "flash_attention@1"}.get(command, "block_q=64")
    assert wanted in shown
    if command == "doctor":
        assert all(op in shown for op in registry().ops)


def test_piped_tables_break_no_line(run, monkeypatch):
    monkeypatch.delenv("COLUMNS")
    shown = CliRunner().invoke(main, ["explain", *SMALL]).output
    forward = shown.split("flash_attention, backward")[0].splitlines()
    (line,) = [line for line in forward if line.startswith("mosaic_gpu ")]
    assert "needs nvidia, this is cpu; dtype float32 is not among bfloat16, float16" in line


def test_a_table_that_does_not_fit_becomes_a_list():
    out = Console(width=40, file=StringIO(), highlight=False)
    rows = [(LONG, "one", "a sentence of several words"), ("", "two", "another")]
    print_table(out, "", "operation", "implementation", "remarks", rows=rows, folded_columns=["remarks"])
    lines = out.file.getvalue().splitlines()
    assert lines[0] == LONG
    assert lines[1].strip().startswith("implementation one; remarks a sentence")
    assert lines[3] == "  implementation two; remarks another"


def test_unstyled_lines_are_not_wrapped():
    out = Console(width=20, file=StringIO(), highlight=False)
    print_unmarked_text(out, f"stored in /a/path/of/{LONG}/and/more [not markup]")
    assert out.file.getvalue() == f"stored in /a/path/of/{LONG}/and/more [not markup]\n"


def test_python_m_runs_the_command_and_prints_no_progress_without_a_terminal(tmp_path):
    environment = {**os.environ, "EJKERNEL_PERSISTENT_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "ejkernel", "tune", *SMALL, *TUNED, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0
    assert done.stderr == ""
    (result,) = json.loads(done.stdout)["results"]
    assert result["winner"]["block_q"] > 0


@pytest.mark.parametrize(
    ("words", "wanted"),
    [("ejkernel explain flash_at", "flash_attention"), ("ejkernel ca", "cache"), ("ejkernel tune --ca", "--calls")],
)
def test_shells_complete_commands_operations_and_options(monkeypatch, words, wanted):
    monkeypatch.setenv("_EJKERNEL_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    shown = CliRunner().invoke(main, prog_name="ejkernel").output
    assert f"plain,{wanted}" in shown.splitlines()
