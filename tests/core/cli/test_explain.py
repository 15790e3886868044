"""`ejkernel explain`, and the mistakes that can be made in describing a call."""

import pytest

SMALL = ("--shape", "1,64,2,16")


def test_both_directions_and_the_whole_chain_are_shown(run):
    output = run("explain", "flash_attention", *SMALL, "-o", "causal=true", "-o", "sliding_window=(8, 0)").output
    for line in (
        "flash_attention, forward, on cpu",
        "flash_attention, backward, on cpu",
        "Configuration from heuristics: block_q=",
        "persistent: no entry in the user store or a shipped table",
    ):
        assert line in output


def test_names_of_operations_may_have_dashes(run):
    assert "flash_attention, forward" in run("explain", "flash-attention", *SMALL).output


def test_a_case_supplies_arguments_that_cannot_be_typed(run):
    assert "chosen" in run("explain", "flash_attention", "--case", "segments with padding").output


def test_an_unavailable_platform_is_explained_and_fails(run):
    output = run("explain", "flash_attention", *SMALL, "--platform", "triton", status=1).output
    assert "platform='triton' was asked for" in output
    assert "No implementation supports the forward pass" in output


def test_the_reasons_name_the_argument_and_the_failed_plugin(run, install):
    install("picky_backend", PICKY)
    install("broken_for_explain", "import no_such_toolchain")
    output = run("explain", "flash_attention", *SMALL, "-o", "causal=true", "--dtype", "float16").output
    assert "causal is not handled" in output
    assert "dtype float16 is not among float32" in output
    assert "No module named 'no_such_toolchain'" in output


PICKY = """
import dataclasses
from ejkernel.ops import hookimpl
from ejkernel_xla.tiled_attention import IMPLEMENTATIONS

@hookimpl
def ejkernel_implementations():
    requires = dataclasses.replace(IMPLEMENTATIONS[0].requires, dtypes=frozenset({"float32"}), handles=frozenset())
    return [dataclasses.replace(IMPLEMENTATIONS[0], name="picky", requires=requires, priority=5)]
"""

MISTAKES = {
    "no shape": ((), "flash_attention takes query, key, value"),
    "shape of no numbers": (("--shape", "1,x"), "got '1,x', wants sizes"),
    "wrong rank": (("--shape", "1,64,16"), "query: got shape (1, 64, 16)"),
    "heads that do not divide": ((*SMALL, "--kv-shape", "1,64,3,16"), "wants a divisor of query's 2"),
    "shape of no argument": (("--shape", "q=1,64,2,16"), "no array argument 'q'; it has query"),
    "too many shapes": (SMALL * 4, "got 4 without a name, flash_attention takes query, key, value"),
    "one array short": (("--shape", "query=1,64,2,16"), "needs the shape of key, value"),
    "no option of that name": ((*SMALL, "-o", "colour=red"), "no option 'colour'; it has softmax_scale"),
    "option without a value": ((*SMALL, "-o", "causal"), "got 'causal', wants NAME=VALUE"),
    "array as an option": ((*SMALL, "-o", "query=3"), "query of flash_attention is an array: --shape"),
    "call option": ((*SMALL, "-o", "mesh=3"), "mesh is not an argument of the operation"),
    "value of the wrong kind": ((*SMALL, "-o", "causal=7"), "causal: got int 7"),
    "value out of range": ((*SMALL, "-o", "sliding_window=0"), "sliding_window: got int 0"),
    "dtype that is none": ((*SMALL, "--dtype", "floaty"), "there is no dtype 'floaty'"),
    "dtype of records": ((*SMALL, "--dtype", "i4,f4"), "there is no dtype 'i4,f4'"),
    "dtype that does not fit": (("--shape", "1,64,2,16:int32"), "wants a floating dtype"),
    "platform": ((*SMALL, "--platform", "abacus"), "platform: got 'abacus'"),
    "case": (("--case", "none of these"), "no case 'none of these'"),
    "case and shape": ((*SMALL, "--case", "plain"), "--case has its own shapes"),
    "two cases": (("--case", "plain", "--case", "causal"), "--case can be used only once"),
    "case and dtype": (("--dtype", "bfloat16", "--case", "plain"), "--case has its own shapes, dtypes"),
    "dtype without a shape": (("--dtype", "bfloat16"), "needs the shape of query, key, value"),
    "dtype of 64 bits": ((*SMALL, "--dtype", "float64"), "float64 needs 64-bit types in JAX: set JAX_ENABLE_X64=1"),
    "option twice": ((*SMALL, "-o", "causal=true", "-o", "causal=false"), "-o: causal is given twice"),
    "shape twice": ((*SMALL, "--shape", "bias=1", "--shape", "bias=2"), "--shape: bias is given twice"),
    "name of a key shape": ((*SMALL, "--kv-shape", "key=1,64,1,16"), "--kv-shape: got the name 'key', wants the sizes"),
    "key shape twice": (
        (*(("--shape", "1,64,2,16") * 3), "--kv-shape", "1,64,1,16"),
        "--kv-shape: --shape has the shape of key and value already",
    ),
    "value size twice": (
        (*SMALL, "--shape", "value=1,64,2,8", "--value-dim", "4"),
        "--value-dim: --shape has the shape of value already",
    ),
    "value size without a value": (("--value-dim", "3"), "no shape of 'value'"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_one_line_and_no_traceback(run, mistake):
    arguments, message = MISTAKES[mistake]
    output = run("explain", "flash_attention", *arguments, status=2).output
    errors = [line for line in output.splitlines() if line.startswith("Error: ")]
    assert len(errors) == 1
    assert message in errors[0]
    assert "Traceback" not in output


def test_unknown_operations_are_answered_with_the_known_ones(run):
    assert (
        "no operation 'flash'; did you mean 'flash_mla' or 'flash_attention'?"
        in run("explain", "flash", *SMALL, status=2).output
    )
