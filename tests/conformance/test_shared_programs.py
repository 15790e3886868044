"""A subject whose output and whose gradients are tested has one program for both."""

import jax
from jax._src import compiler

from ejkernel.ops.plugins import registry
from ejkernel_conformance import running
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
