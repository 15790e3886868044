"""Each test of the suite runs the implementation that it names, not the one that dispatch would choose."""

from ejkernel.ops.plugins import registry
from ejkernel_conformance.subjects import Subject, abstract_record, pinned_plan, refusal


def subject(op_name, implementation_name):
    found = registry()
    op = found.ops[op_name]
    listed = found.implementations[op_name]
    return Subject(op=op, implementation=next(x for x in listed if x.name == implementation_name), case=op.cases[0])


def test_a_pinned_plan_chooses_its_implementation_alone():
    pinned = subject("flash_attention", "xla")
    plan = pinned_plan(pinned.op, pinned.implementation)
    choice = plan.choose_implementation(abstract_record(pinned.op, pinned.case), "forward")
    assert choice.implementation is pinned.implementation
    assert [verdict.implementation.name for verdict in choice.verdicts] == ["xla"]


def test_a_pinned_plan_refuses_where_another_implementation_could_serve():
    assert refusal(subject("flash_attention", "cudnn"), "forward").startswith("cudnn: ")
    assert not refusal(subject("flash_attention", "xla"), "forward")
