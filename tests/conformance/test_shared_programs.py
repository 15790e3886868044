"""A subject whose output and whose gradients are tested has one program for both."""

from pathlib import Path
from types import SimpleNamespace

import jax
from jax._src import compiler

from ejkernel.ops.plugins import registry
from ejkernel_conformance import plugin, running
from ejkernel_conformance.subjects import Subject


def test_output_and_gradients_are_computed_by_one_program(monkeypatch):
    found = registry()
    op = found.ops["mean_pooling"]
    [implementation] = [i for i in found.implementations["mean_pooling"] if i.name == "xla"]
    subject = Subject(op=op, implementation=implementation, case=op.cases[0])
    cotangent = running.cotangent(op, subject.case)
    running.asked_for_both.add(subject)
    output = running.forward(subject)(subject.args)

    def fail(*args, **kwargs):
        raise AssertionError("another program")

    monkeypatch.setattr(compiler, "compile_or_get_cached", fail)
    again, gradients = running.forward_and_backward(subject)(subject.args, cotangent)
    assert output.tobytes() == again.tobytes()
    assert gradients.keys() == set(running.differentiable_inputs(op, subject.case))
    assert jax.tree.leaves(gradients)


def test_requests_and_their_gradients_are_computed_by_one_program(monkeypatch):
    found = registry()
    op = found.ops["mean_pooling"]
    [implementation] = [i for i in found.implementations["mean_pooling"] if i.name == "xla"]
    subject = Subject(op=op, implementation=implementation, case=op.cases[0])
    running.requests_asked_for_both.add(subject)
    cotangent = running.record_cotangent(subject)
    output = running.on_records(subject, isolates=True)(subject.record)

    def fail(*args, **kwargs):
        raise AssertionError("another program")

    monkeypatch.setattr(compiler, "compile_or_get_cached", fail)
    again, gradients = running.on_records_with_gradients(subject, isolates=True)(subject.record, cotangent)
    assert jax.tree.leaves(output)[0].tobytes() == jax.tree.leaves(again)[0].tobytes()
    assert jax.tree.leaves(gradients)


def test_tests_of_a_subject_are_next_to_each_other():
    def item(name: str, **params: object) -> SimpleNamespace:
        return SimpleNamespace(name=name, path=Path("suite.py"), callspec=SimpleNamespace(params=params))

    first, second = object(), object()
    items = [
        item("value of first", ejk_subject=first),
        item("value of second", ejk_subject=second),
        SimpleNamespace(name="of something else", path=Path("suite.py")),
        item("gradients of first", ejk_differentiable=first),
        item("gradients of second", ejk_differentiable=second),
    ]
    plugin.put_tests_of_a_subject_together(items)
    assert [item.name for item in items] == [
        "value of first",
        "gradients of first",
        "of something else",
        "value of second",
        "gradients of second",
    ]
