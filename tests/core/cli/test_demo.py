"""`ejkernel demo`."""


def test_demo_shows_the_dispatch_of_a_call_and_a_correct_result(run):
    output = run("demo", "--length", "96").output
    for said in (
        "ejkernel-xla",
        "flash_attention, forward, on cpu",
        "gradient of key",
        "temporary MB",
        "The results agree.",
    ):
        assert said in output
    assert "NO" not in output.split()


def test_demo_fails_where_results_are_wrong(run, install):
    install("demo_backend", LYING)
    output = run("demo", "--length", "96", status=1).output
    assert "WRONG" in output
    assert "The results agree." not in output


LYING = """
import dataclasses
from ejkernel.ops import hookimpl
from ejkernel_xla.tiled_attention import IMPLEMENTATIONS, forward

def lie(record, config):
    output, residuals = forward.forward(record, config)
    return 1.01 * output, residuals

@hookimpl
def ejkernel_implementations():
    return [dataclasses.replace(IMPLEMENTATIONS[0], name="liar", priority=5, forward=f"{__name__}:lie")]
"""
