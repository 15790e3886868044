"""`ejkernel_conformance.random_calls`: what it draws, and that it finds what is wrong."""

import dataclasses
import functools
import json
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner

from ejkernel.ops.plugins import registry
from ejkernel_conformance.confirm.listing import SuiteTest
from ejkernel_conformance.confirm.state import Result
from ejkernel_conformance.random_calls import command, comparing, loops
from ejkernel_conformance.random_calls.comparing import WrongError, compare
from ejkernel_conformance.random_calls.programs import DRAWN, Program, make_program


def test_all_operations_are_drawn():
    from ejkernel.modules.operations import OPS

    assert DRAWN.keys() == {op.name for op in OPS}
    assert DRAWN.keys() <= registry().ops.keys()


@pytest.mark.parametrize("op", ["flash_attention", "unified_attention", "ragged_page_attention_v3", "state_space_v1"])
def test_programs_are_valid_and_can_be_drawn_again(op):
    for number in range(4):
        program = make_program(f"0:{op}:{number}")
        args = program.arguments(1)
        program.op.validate(args)
        jax.eval_shape(program.op.reference, args)
        again = make_program(f"0:{op}:{number}").arguments(1)
        assert jax.tree.structure(args) == jax.tree.structure(again)
        assert all(
            np.array_equal(x, y, equal_nan=True) for x, y in zip(*map(jax.tree.leaves, (args, again)), strict=True)
        )


def test_memory_that_is_not_read_is_poisoned():
    program = make_program("0:page_attention:0")
    args, clean = program.arguments(0), program.arguments(0, poisoned=False)
    assert np.isnan(np.asarray(args.key_cache, np.float32)).any()
    assert not np.isnan(np.asarray(clean.key_cache, np.float32)).any()


def program(function=None, differentiated=False):
    """A small program of `gather_reduce` in which some rows are read by no index; `function` stands in for its own."""
    found = next(
        drawn
        for n in range(100)
        for drawn in [make_program(f"0:gather_reduce:{n}")]
        if np.isnan(np.asarray(drawn.arguments(0).rows, np.float32)).any()
        and drawn.arguments(0).rows.dtype == np.float32
    )
    op = found.op if function is None else dataclasses.replace(found.op, function=function)
    return Program(op, found.drawn, found.seed, differentiated)


def changed(change):
    """The operation's function with its output changed; XLA, asked for by name, is not."""
    function = registry().op("gather_reduce").function

    @functools.wraps(function)
    def call(rows, *args, platform=None, **kwargs):
        output = function(rows, *args, platform=platform, **kwargs)
        return output if platform else change(output, rows)

    return call


def test_what_is_right_passes():
    found = compare(program(differentiated=True), 2)
    assert (found["calls"], found["differentiated"], found["implementation"]) == (2, True, "xla, xla")
    assert found["error"] < 1e-5
    assert found["xla_error"] < 1e-5


@pytest.mark.parametrize(
    "change",
    [
        lambda output, rows: output * 1.01,
        lambda output, rows: output.at[0, 0].set(jnp.nan),
        lambda output, rows: output + 0 * jnp.sum(rows),
    ],
    ids=["wrong by 1%", "one NaN", "reads what is not to be read"],
)
def test_what_is_wrong_is_found(change):
    with pytest.raises(WrongError, match=r"values 0: output: .* entries are wrong"):
        compare(program(changed(change)), 1)


def test_results_that_differ_from_run_to_run_are_found(monkeypatch):
    compiled, runs = comparing._compiled, []

    def unsteady(*args, **kwargs):
        run = compiled(*args, **kwargs)

        def call(arguments):
            runs.append(None)
            return jax.tree.map(lambda x: np.nextafter(x, np.float32(len(runs) % 2)), run(arguments))

        return call

    monkeypatch.setattr(comparing, "_compiled", unsteady)
    with pytest.raises(WrongError, match="two runs on the same inputs differ"):
        compare(program(), 1)


@pytest.fixture
def device_loops(monkeypatch):
    """The file of loops, as a run names it."""
    path = Path(__file__).parents[1] / "loops/device_loops.py"
    monkeypatch.setenv(loops.VARIABLE, str(path))
    monkeypatch.setattr(sys, "path", list(sys.path))
    loops.named_loops.cache_clear()
    yield loops.named_loops()
    loops.named_loops.cache_clear()


@pytest.mark.parametrize("op", ["mean_pooling", "grouped_matmul", "kernel_delta_attention"])
def test_references_say_what_loops_say(device_loops, op):
    drawn = make_program(f"0:{op}:3")
    args = drawn.arguments(0, poisoned=False)
    output = jax.tree.leaves(comparing._truth(drawn, ())(args)[0])[0]
    single = comparing._cast(args, np.float64)
    assert loops.differs(op, single, output) == ""
    assert "is off from the loop" in loops.differs(op, single, output * 1.001)
    assert loops.differs("rnn", single, output) is None


def test_a_failure_prints_the_command_that_repeats_it(capsys):
    tests = [SuiteTest(f"7:rnn:{n}", "", "default", "rnn", f"7:rnn:{n}") for n in range(3)]
    right = {"calls": 6, "refused": "", "loose": 0, "error": 0.25, "xla_error": 0.5, "implementation": "xla, triton"}
    results = {"7:rnn:0": Result("passed", 1.0, json.dumps(right)), "7:rnn:1": Result("failed", 1.0, "values 3: wrong")}
    command.print_summary(tests, results)
    out = capsys.readouterr().out
    assert re.search(r"^rnn +6 +1 +1 +0 +0 +0 +0.25 +0.5  triton, xla$", out, re.MULTILINE)
    assert "WRONG 7:rnn:1: values 3: wrong" in out
    (line,) = re.findall(r"python3 -m ejkernel_conformance.random_calls (run .*)", out)
    assert CliRunner().invoke(command.main, [*line.split(), "--help"]).exit_code == 0
    assert line.endswith("--only 7:rnn:1")
