"""Reading what libtpu writes, line by line."""

import pytest
import recorded_schedules

from ejkernel_pallas.tpu.profile.bundles import parse_allocations, parse_bundles, parse_utilisation

TEXT = """
= control target key start
LB: loop body
= control target key end

     0   :  { %s1_s0 = inlined_call_operand.hbm [shape: s32[4], index: 3, kind: input, shape index: {}] /* operand 3 */ }
   0x1 LB: > { %s2_s1 = sadd.s32 4294967295, %s9_s0 /* a, b */  ;;  %p3_p0 = scmp.eq.s32.totalorder %s2_s1, 0 } /* Start region 7 */
   0x2   : >> { %5 = dma.hbm_to_vmem [thread:$0]  (%p3_p0), /*hbm=*/%s1_s0, /*size_in_granules=*/16, /*vmem=*/[#allocation2 + $0x8], /*dst_syncflagno=*/[#allocation4] }
   0x3   : > { %s6_s2 = smov (!%p3_p0, %s2_s1), 5  ;;  %8 = sst [smem:[#allocation5 + %s6_s2]] %s2_s1 }
   0x4   : > { %9 = sbr.rel (!%p3_p0) target = $region7 }
   0x5   :  {} /* Start/End empty region 9 :: End region 7 */
"""  # noqa: E501 - as they are written


@pytest.fixture(scope="module")
def bundles():
    return parse_bundles(TEXT)


def test_bundles_have_a_loop_depth_and_regions(bundles):
    assert [bundle.depth for bundle in bundles] == [0, 1, 2, 1, 1, 0]
    assert [bundle.started_regions for bundle in bundles] == [(), (7,), (), (), (), (9,)]
    assert [len(bundle.instructions) for bundle in bundles] == [1, 2, 1, 2, 1, 0]


def test_kernel_operands_have_a_memory_space_and_an_index(bundles):
    (operand,) = bundles[0].instructions
    assert (operand.result, operand.opcode, operand.operands) == ("s1", "inlined_call_operand", ("hbm", "3"))


def test_comments_are_not_parsed_as_operands(bundles):
    add, compare = bundles[1].instructions
    assert (add.result, add.opcode, add.operands) == ("s2", "sadd.s32", ("4294967295", "%s9_s0"))
    assert (compare.result, compare.operands) == ("p3", ("%s2_s1", "0"))


def test_copies_have_named_operands_and_a_predicate(bundles):
    (copy,) = bundles[2].instructions
    assert copy.opcode == "dma.hbm_to_vmem"
    assert (copy.predicate.register, copy.predicate.is_negated, copy.predicate.value_if_false) == ("p3", False, None)
    names = {"hbm": "%s1_s0", "size_in_granules": "16", "vmem": "[#allocation2 + $0x8]"}
    assert copy.named_operands == {**names, "dst_syncflagno": "[#allocation4]"}


def test_predicates_may_name_the_value_if_false(bundles):
    move, store = bundles[3].instructions
    assert (move.predicate.is_negated, move.predicate.value_if_false, move.operands) == (True, "%s2_s1", ("5",))
    assert store.operands == ("[smem:[#allocation5 + %s6_s2]]", "%s2_s1")


def test_branches_name_a_region(bundles):
    (branch,) = bundles[4].instructions
    assert (branch.branch_region, branch.predicate.register, branch.predicate.is_negated) == (7, "p3", True)


def test_utilisation_table_is_parsed():
    text = "== CAPACITY:\nMXU, VLOAD:FILL\n    4     3\n== UTILIZATION:\n1 0\n3 2\n"
    found = parse_utilisation(text)
    assert (found.slots, found.slot_capacity, found.used_slots) == (("MXU", "VLOAD:FILL"), (4, 3), ((1, 0), (3, 2)))
    assert found.count_slot_uses("VLOAD:FILL", {0: 7, 1: 5}) == 10
    assert found.slot_shares({0: 1, 1: 3}) == {"MXU": 10 / 16, "VLOAD:FILL": 6 / 12}
    assert parse_utilisation("").count_slot_uses("MXU", {0: 1}) == 0


def test_allocations_have_a_memory_space_a_size_and_a_purpose():
    text = """
      #allocation0 [shape = 'u32[]', space=smem, size = 0x4, offset = 0x4, fixed_abs, tag = 'address 0x4 - core index']
      #allocation7 [shape = 'u8[16384]{0}', space=vmem, size = 16384, scoped, tag = 'output window']
    """
    first, second = parse_allocations(text)
    assert (first.name, first.memory_space, first.size) == ("allocation0", "smem", 4)
    assert first.purpose.endswith("core index")
    assert (second.memory_space, second.size, second.purpose) == ("vmem", 16384, "output window")


@pytest.mark.parametrize("name", recorded_schedules.NAMES)
def test_every_recorded_bundle_is_parsed(name):
    text, used, _ = recorded_schedules.texts(name)
    bundles = parse_bundles(text)
    assert len(bundles) == len(parse_utilisation(used).used_slots)
    slots = sum(line.count(" = ") - line.count("target = ") for line in _code(text))
    assert sum(len(bundle.instructions) for bundle in bundles) == slots


def _code(text: str) -> list[str]:
    """Bundles without comments, which may hold anything, line breaks included."""
    parts = text.split("/*")
    kept = [parts[0]] + [part.partition("*/")[2] for part in parts[1:]]
    return "".join(kept).splitlines()
