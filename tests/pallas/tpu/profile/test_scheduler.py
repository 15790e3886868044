"""Bundles are issued in order, and wait for units and results: cycles that can be counted by hand."""

import dataclasses

import pytest

from ejkernel_pallas.tpu.profile.bundles import Bundle, Instruction
from ejkernel_pallas.tpu.profile.chips import Latencies
from ejkernel_pallas.tpu.profile.flow import BasicBlock
from ejkernel_pallas.tpu.profile.scheduler import InstructionKind, RegistersPerInput, opcode_properties, time_block

LATENCIES = Latencies(
    branch_delay_slots=4, matmul_interval=16, matmul_f32_interval=8, matmul_result_latency=110, weight_push_interval=4,
    transposed_weight_push_interval=8, cross_lane_interval=8, reduction_latency=95, rotation_latency=100,
    transposition_latency=60, transcendental_latency=6, dma_read_latency=900, dma_write_latency=390,
)  # fmt: skip
EVEN = RegistersPerInput(1.0, 1.0)
BF16 = "vmatmul.mubr.bf16.gmra.mxu0"
F32 = "vmatmul.mubr.f32.gmra.mxu0"


def issued(*bundles: tuple[str, ...], registers_per_input: RegistersPerInput = EVEN) -> list[int]:
    """Cycles at which bundles are issued; an instruction is `result=opcode operand`."""
    made = [Bundle(0, (), tuple(map(instruction, bundle))) for bundle in bundles]
    return list(
        time_block(BasicBlock(0, len(made), None, len(made)), made, LATENCIES, registers_per_input).issue_cycles
    )


def instruction(text: str) -> Instruction:
    result, _, rest = text.rpartition("=")
    opcode, *operands = rest.split()
    return Instruction(result or None, opcode, None, tuple(operands), {})


def test_independent_bundles_are_issued_every_cycle():
    assert issued(("v1=vadd.f32",), (), ("v2=vmul.f32 %v1",)) == [0, 1, 2]


def test_products_wait_only_for_their_matrix_unit():
    assert issued((BF16,), (BF16.replace("mxu0", "mxu1"),), (BF16,), (BF16,)) == [0, 1, 16, 32]


def test_float32_products_occupy_their_unit_for_their_own_interval():
    assert issued((F32,), (F32,)) == [0, 8]


def test_product_results_are_popped_in_order_when_ready():
    pop = "v1=vpop.f32.mrf.mxu0"
    # Two registers a product: the second product's first result is the third pop.
    assert issued((BF16,), (BF16,), (pop,), (pop,), (pop,)) == [0, 16, 110, 111, 126]


def test_results_of_an_earlier_block_are_ready():
    pop = "v1=vpop.f32.mrf.mxu0"
    assert issued((pop,), (BF16,), (pop,), (pop,)) == [0, 1, 111, 112]


def test_pops_from_the_result_buffer_wait_for_their_slot():
    push, pop = "vmatmul.mubr.bf16.vlgmr.gmra.mrb[4].mxu0", "v1=vpop.f32.mrb[{}].mxu0"
    assert issued((push,), (pop.format(0),), (pop.format(7),)) == [0, 1, 110]


def test_products_that_load_weights_wait_for_their_pushes():
    pushes = ("vmatpush.bf16.msra.mxu0",), ("vmatpush.bf16.xpose.msra.mxu0",)
    assert issued(*pushes, ("vmatmul.mubr.bf16.vlgmr.msra.gmra.mxu0",)) == [0, 4, 12]
    assert issued(*pushes, (BF16,)) == [0, 4, 5]


def test_reductions_occupy_their_unit_and_have_a_result_latency():
    first, second = "2=vadd.xlane.f32.xlu0 %v0", "3=vadd.xlane.f32.xlu0 %v1"
    assert issued((first,), (second,), ("v4=vpop.xlane.xlu0 %2",), ("v5=vpop.xlane.xlu0 %3",)) == [0, 8, 95, 103]


def test_rotations_are_issued_every_cycle():
    assert issued(("2=vrot.lane.xlu1 %v0",), ("3=vrot.lane.xlu1 %v1",), ("v4=vpop.permute.xlu1 %3",)) == [0, 1, 101]


def test_transposed_registers_are_ready_after_the_last_push():
    start, end, pop = "1=vxpose.xlu0.b32.start", "2=vxpose.xlu0.b32.end", "v1=vpop.trf.xlu0"
    assert issued((start,), (end,), (pop,), (pop,)) == [0, 8, 68, 69]


def test_pops_of_transcendental_results_wait_for_their_latency():
    assert issued(("1=vpow2.f32 %v0",), ("v2=vpop.eup %1",)) == [0, 6]


def test_result_registers_per_input_are_counted_over_a_kernel():
    pops = [instruction("v1=vpop.f32.mrf.mxu0")] * 3
    bundles = [Bundle(0, (), (instruction(BF16), instruction(BF16), instruction(BF16), *pops))]
    assert RegistersPerInput.of(bundles) == RegistersPerInput(0.5, 1.0)
    assert RegistersPerInput.of([]) == EVEN
    pop, halved = "v1=vpop.f32.mrf.mxu0", RegistersPerInput(0.5, 1.0)
    assert issued((BF16,), (BF16,), (pop,), (pop,), registers_per_input=halved) == [0, 16, 110, 126]


@pytest.mark.parametrize(
    ("opcode", "kind", "unit"),
    [
        ("vmatprep.subr.bf16.mxu1", InstructionKind.OTHER, 1),
        ("vmatpush2.bf16.msrb.mxu3", InstructionKind.PUSH_WEIGHTS, 3),
        ("vmatmul.mubr.f32.mxu2", InstructionKind.MATMUL, 2),
        ("vmax.xlane.f32.xlu2", InstructionKind.REDUCE, 2),
        ("vpop.trf.xlu1", InstructionKind.POP_TRANSPOSED, 1),
        ("vrcp.f32", InstructionKind.TRANSCENDENTAL, 0),
        ("vadd.f32", InstructionKind.OTHER, 0),
    ],
)
def test_opcodes_are_classified_by_kind(opcode, kind, unit):
    assert (opcode_properties(opcode).kind, opcode_properties(opcode).unit) == (kind, unit)


def test_every_chip_has_every_latency():
    assert all(getattr(LATENCIES, field.name) > 0 for field in dataclasses.fields(LATENCIES))
