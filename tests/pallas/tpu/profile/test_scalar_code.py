"""The scalar code of schedules, run."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ejkernel_pallas.tpu.profile import CHIPS
from ejkernel_pallas.tpu.profile.machine import ALLOCATION_ADDRESS_STRIDE, shift_left, shift_right, wrap_to_int32
from ejkernel_pallas.tpu.profile.simulate import CompiledKernel

# Copies `%s8` granules; every test puts what it computes there.
COPY = "{ %9 = dma.hbm_to_vmem /*hbm=*/%s1_s0, /*size_in_granules=*/%s8_s8, /*vmem=*/%s1_s0, /*dst_syncflagno=*/[#allocation4] }"  # noqa: E501


def run(*bundles: str, operands=None):
    lines = [f"   {k:#x}   :  {bundle}\n" for k, bundle in enumerate(bundles)]
    return CompiledKernel(CHIPS["v5e"], "".join(lines)).run(operands or {})


def computed(*instructions: str, operands=None) -> int:
    """What the instructions leave in `%s8`."""
    bundles = [f"{{ {instruction} }}" for instruction in instructions]
    return run(*bundles, COPY, operands=operands).copied_bytes_by_kind["hbm_to_vmem"] // 32


GENERAL = "{ %9 = dma.general /*src=*/%s1_s0, /*size_in_granules=*/16, /*dst=*/%s2_s1, /*dst_syncflagno=*/%s4_s4, /*src_syncflagno=*/%s3_s3, /*stridedescaddr=*/[#allocation9], /*overrides=*/%s5_s5, /*dst_syncflagno_1=*/0 /* hbm-to-vmem */ }"  # noqa: E501


@pytest.mark.parametrize(
    ("device", "copied"), [(0, {"hbm_to_vmem": 512}), (16384 + 3, {"hbm_to_ici": 512, "ici_to_vmem": 512})]
)
def test_general_copies_count_their_memories_and_devices(device, copied):
    """Both semaphores of one to another device are waited for: as much comes as goes."""
    semaphores = ("{ %s3_s3 = smov [#allocation3] }", "{ %s4_s4 = sor.u32 16384, [#allocation4 + $0x1] }")
    local = ("{ %s3_s3 = smov 0 }", "{ %s4_s4 = smov [#allocation4 + $0x1] }")
    waits = ("{ %11 = dma.done.wait [#allocation4 + $0x1], 16 }", "{ %12 = dma.done.wait [#allocation3], 16 }")
    found = run(f"{{ %s5_s5 = smov {device} }}", *(semaphores if device else local), GENERAL, *waits)
    assert found.copied_bytes_by_kind == copied
    assert found.bytes_sent_to_devices == copied.get("hbm_to_ici", 0)
    assert found.waited_cycles > 400


def test_a_phi_reads_the_value_of_another_phi():
    """As where an inner loop begins with what the outer one carries."""
    assert computed("%s1_s1 = smov 5", "%s2_s2 = sphi %s1_s1, %s5_s5", "%s8_s8 = sphi %s2_s2, %s7_s7") == 5


INTEGER = st.integers(-(2**31), 2**31 - 1)


@pytest.mark.parametrize(
    ("opcode", "numpy_function"),
    [
        ("sadd.s32", np.add),
        ("ssub.s32", np.subtract),
        ("smul.u32", np.multiply),
        ("sand.u32", np.bitwise_and),
        ("sor.u32", np.bitwise_or),
        ("sxor.u32", np.bitwise_xor),
        ("smin.s32", np.minimum),
        ("smax.s32", np.maximum),
    ],
)
@settings(max_examples=10, deadline=None)
@given(a=INTEGER, b=INTEGER)
def test_scalar_arithmetic_matches_32_bit_numpy(opcode, numpy_function, a, b):
    with np.errstate(over="ignore"):
        want = int(numpy_function(np.array([a], np.int32), np.array([b], np.int32))[0])
    unsigned = [value & 0xFFFFFFFF for value in (a, b)]
    assert computed(f"%s8_s8 = {opcode} {unsigned[0]}, {unsigned[1]}") == want


@pytest.mark.parametrize(
    ("opcode", "want"),
    [
        ("sshll.u32 3, 4", 48),
        ("sshll.u32 1, 31", -(2**31)),
        ("sshrl.u32 4294967295, 28", 15),
        ("sshra.s32 4294967280, 2", -4),
        ("sshllo.u32 2, 3", 23),
        ("snot.u32 5", -6),
        ("smulhi.u32 4294967295, 4294967295", -2),
        ("smulhi.u32 85, 3435973837", 68),
        ("smin.u32 4294967295, 7", 7),
        ("smax.u32 4294967295, 7", -1),
        ("smov 12", 12),
        ("scalar_lea.vmem 40, 2", 42),
    ],
)
def test_shifts_and_other_scalar_instructions(opcode, want):
    assert computed(f"%s8_s8 = {opcode}") == want


@pytest.mark.parametrize(
    ("comparison", "want"),
    [("eq.s32", 0), ("ne.s32", 1), ("lt.s32", 1), ("ge.s32", 0), ("lt.u32", 0), ("gt.u32", 1), ("le.s32", 1)],
)
def test_comparisons_are_signed_or_unsigned(comparison, want):
    compare = f"%p2_p0 = scmp.{comparison}.totalorder 4294967295, 3"
    select = "%s8_s8 = scalar_select /*predicate=*/%p2_p0, /*on_true=*/1, /*on_false=*/0"
    assert computed(compare, select) == want


@pytest.mark.parametrize(("operation", "want"), [("por", 1), ("pand", 0), ("pnand", 1), ("pnor", 0), ("pxor", 1)])
def test_predicate_operations_are_evaluated(operation, want):
    compares = "%p1_p1 = scmp.eq.s32.totalorder 1, 1", "%p2_p2 = scmp.eq.s32.totalorder 1, 2"
    select = "%s8_s8 = scalar_select /*predicate=*/%p3_p3, /*on_true=*/1, /*on_false=*/0"
    assert computed(*compares, f"%p3_p3 = {operation} %p1_p1, %p2_p2", select) == want


def test_a_false_predicate_gives_the_other_value():
    compare = "%p2_p0 = scmp.eq.s32.totalorder 1, 2"
    assert computed(compare, "%s8_s8 = smov (%p2_p0, 4), 9") == 4
    assert computed(compare, "%s8_s8 = smov (!%p2_p0, 4), 9") == 9


def test_scalar_stores_are_read_back():
    store = "%5 = sst [smem:[#allocation1 + %s2_s2]] 77"
    assert computed("%s2_s2 = smov 3", store, "%s8_s8 = sld [smem:[#allocation1 + $0x3]]") == 77


def test_unwritten_scalar_memory_reads_as_zero_and_is_counted():
    found = run("{ %s8_s8 = sld [smem:[#allocation1 + $0x3]] }", COPY)
    assert (found.copied_bytes_by_kind["hbm_to_vmem"], found.unknown_reads) == (0, {"allocation1": 1})


def test_known_scalar_operands_are_read():
    operand = "%s1_s0 = inlined_call_operand.smem [shape: s32[4], index: 2, kind: input, shape index: {}]"
    assert computed(operand, "%s8_s8 = sld [smem:[%s1_s0 + $0x1]]", operands={2: [5, 6, 7]}) == 6
    scalar = "%s8_s8 = inlined_call_operand.<no memory space> [shape: s32[], index: 1, kind: input, shape index: {}]"
    assert computed(scalar, operands={1: [41]}) == 41


LOOP = (
    "{ %s1_s0 = smov 0 } /* Start region 1 */",
    "{ %s2_s0 = sphi %s1_s0, %s3_s0 } /* Start region 2 */",
    "{ %s3_s0 = sadd.s32 1, %s2_s0 ;; %s8_s8 = smov %s2_s0 }",
    COPY,
    "{ %p4_p0 = scmp.ge.s32.totalorder %s3_s0, 5 }",
    "{ %6 = sbr.rel (!%p4_p0) target = $region2 }",
    "{}",
    "{}",
    "{}",
    "{}",
)


def test_loops_run_for_their_trip_count():
    schedule = CompiledKernel(CHIPS["v5e"], "".join(f"   {k:#x}   : > {bundle}\n" for k, bundle in enumerate(LOOP)))
    found = schedule.run({})
    assert found.num_copies_by_kind == {"hbm_to_vmem": 5}
    assert found.copied_bytes_by_kind == {"hbm_to_vmem": 32 * (0 + 1 + 2 + 3 + 4)}
    assert [found.issues_per_bundle[k] for k in range(len(LOOP))] == [1] + [5] * 9
    ((loop),) = schedule.loops(found.entries_per_block)
    assert (loop.start, loop.end, loop.depth, loop.num_trips, loop.bundles) == (1, 9, 1, 5, 9)
    assert found.cycles == found.compute_cycles == 1 + 5 * 9


def test_an_endless_schedule_is_stopped_at_the_time_limit():
    forever = ("{ %s1_s0 = smov 0 } /* Start region 1 */", "{ %6 = sbr.rel target = $region1 }", *["{}"] * 4)
    schedule = CompiledKernel(CHIPS["v5e"], "".join(f"   {k:#x}   :  {bundle}\n" for k, bundle in enumerate(forever)))
    assert not schedule.run({}, seconds=0.01).is_complete


@given(st.integers(-(2**40) + 1, 2**40 - 1))
def test_integers_wrap_to_32_bits(value):
    assert wrap_to_int32(value) == int(np.array([value & 0xFFFFFFFF], np.uint32).view(np.int32)[0])


def test_addresses_do_not_wrap():
    address = 3 * ALLOCATION_ADDRESS_STRIDE + 5
    assert wrap_to_int32(address) == shift_left(address, 4) == shift_right(address, 4) == address
    assert (shift_left(-1, 4), shift_right(-1, 28)) == (-16, 15)
