"""`ejkernel doctor` on plugins: typos in what they declare, and names that another plugin has."""

import json

import pytest

BACKEND = """
import dataclasses
from ejkernel.ops import hookimpl
from ejkernel_xla.segment_pooling import IMPLEMENTATIONS

@hookimpl
def ejkernel_implementations():
    requires = dataclasses.replace(IMPLEMENTATIONS[0].requires, {requires})
    return [dataclasses.replace(IMPLEMENTATIONS[0], requires=requires, {fields})]
"""
TYPOS = BACKEND.format(
    requires='handles=frozenset({"lengthz"}), dtypes=frozenset({"fp32"})',
    fields='name="typing", forward="typing_backend.nowhere:forward"',
)
CLASH = BACKEND.format(requires="", fields='name="xla", priority=-7')


def test_typos_in_declarations_are_found_without_a_call(run, install):
    install("typing_backend", TYPOS)
    output = run("doctor").output
    for sentence in (
        "implementation 'typing' of segment_pooling: requires.handles: there is no 'lengthz'; did you mean 'lengths'?",
        "requires.dtypes: there is no dtype 'fp32'",
        "forward: 'typing_backend.nowhere:forward': there is no module 'typing_backend.nowhere'",
    ):
        assert sentence in output
    assert "loaded, with problems" in output
    run("doctor", "--strict", status=1)
    plugins = json.loads(run("doctor", "--json").stdout)["plugins"]
    assert {one["name"]: len(one["problems"]) for one in plugins if one["problems"]} == {"typing_backend": 3}


@pytest.mark.usefixtures("traced_cases")
def test_a_plugin_with_the_name_of_a_built_in_implementation_evicts_nothing(run, install):
    install("clashing_backend", CLASH)
    sentence = "implementation 'xla' of clashing_backend is named 'clashing_backend:xla', because ejkernel-xla has an"
    assert sentence in run("doctor").output
    run("doctor", "--strict")
    output = run("ops").output
    assert sentence in output
    assert "xla, clashing_backend:xla" in output
    explained = run("explain", "mean_pooling", "--shape", "1,16,8").output
    assert sentence in explained
    found = json.loads(run("explain", "mean_pooling", "--shape", "1,16,8", "--json").stdout)["forward"]
    assert found["implementation"] == "xla"
    assert any(sentence in note for note in found["notes"])
    assert "clashing_backend:xla" in [verdict["implementation"] for verdict in found["verdicts"]]
