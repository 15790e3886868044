"""Evidence for changed sources, where these lower to the programs that a chip has confirmed."""

import copy
import json
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import msgspec
import pytest
from click.testing import CliRunner

from ejkernel.ops import evidence
from ejkernel.ops.evidence import CarriedEvidence, Confirmation, EvidenceFile, FamilyEvidence, Tally
from ejkernel_conformance.confirm import carrying, programs
from ejkernel_conformance.confirm.command import main
from ejkernel_conformance.confirm.programs.cpp_sources import sources_of

PROGRAM = {"program": "p1", "kernels": [["launch", "k1"]], "aliases": False}
FOUND = FamilyEvidence(digest="d1", operations={"flash": Tally(passed=3)})
VERSIONS = ({"jax": "0.11.2"}, {"jax": "0.12.0"})


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A backend whose sources have changed from d1 to d2 since its evidence, which is of two toolchains."""
    folder = tmp_path / "carried/evidence/sm_90"
    folder.mkdir(parents=True)
    (tmp_path / "carried/__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    both = tuple(Confirmation(device="H", versions=x, at="1", families={"attention": FOUND}) for x in VERSIONS)
    (folder / "fast.json").write_bytes(
        evidence.encode(EvidenceFile(implementation="fast", chip="sm_90", confirmations=both))
    )
    found = SimpleNamespace(folder=folder)

    def name(implementation, digest="d2"):
        known = {("attention", implementation): SimpleNamespace(evidence="carried:evidence", name=implementation)}
        monkeypatch.setattr(carrying, "implementations", lambda: known)
        monkeypatch.setattr(carrying, "digests", lambda keys: {f"attention/{implementation}": digest})

    found.name = name
    name("fast")
    yield found
    sys.modules.pop("carried", None)


def programs_of(digest, key="attention/fast", **changes):
    content = {
        "format": programs.FORMAT,
        "chip": "h200",
        "toolchain": {"jax": "0.10.2"},
        "whole": True,
        "digests": {key: digest},
        "programs": {key: {"flash, a": PROGRAM, "flash, b": {**PROGRAM, "program": "p2"}}},
        "sources": {key: {"handler": "c1"}},
    }
    return copy.deepcopy(content | changes)


def families(tree, name="fast"):
    file = evidence.decode((tree.folder / f"{name}.json").read_bytes())
    return [one.families["attention"] for one in file.confirmations]


def test_the_same_programs_renew_the_digest_of_every_toolchain_and_say_so(tree):
    result = carrying.carry(programs_of("d1"), programs_of("d2"), {})
    assert (result.refused, [path.name for path in result.written]) == (0, ["fast.json"])
    assert result.lines == ("attention/fast: carried from d1 to d2, 2 programs are the same",)
    for found in families(tree):
        assert (found.digest, found.stale, found.carried) == ("d2", False, CarriedEvidence(digest="d1", programs=2))
        assert found.operations == FOUND.operations


def test_evidence_is_carried_on_from_what_the_chip_ran(tree):
    carrying.carry(programs_of("d1"), programs_of("d2"), {})
    assert carrying.carry(programs_of("d1"), programs_of("d2"), {}).written == ()
    tree.name("fast", "d3")
    carrying.carry(programs_of("d1"), programs_of("d3"), {})
    assert {(found.digest, found.carried.digest) for found in families(tree)} == {("d3", "d1")}


def change(content, what):
    listed = content["programs"]["attention/fast"]
    if what == "missing":
        del listed["flash, b"]
    elif what == "new":
        listed["flash, c"] = PROGRAM
    elif what == "differs":
        listed["flash, b"]["kernels"] = [["launch", "k2"]]
    elif what == "differs outside of its kernels":
        listed["flash, b"]["program"] = "p3"
    elif what == "C++":
        content["sources"]["attention/fast"]["handler"] = "c2"
    elif what == "operations alone":
        content["whole"] = False
    elif what == "of sources":
        content["digests"]["attention/fast"] = "d9"
    elif what == "does not have it":
        content["digests"].clear()
    return content


REASONS = ("missing", "new", "differs", "differs outside of its kernels", "C++", "operations alone", "of sources")


@pytest.mark.parametrize("what", [*REASONS, "does not have it"])
def test_other_programs_leave_it_stale_and_name_the_call(tree, what):
    result = carrying.carry(programs_of("d1"), change(programs_of("d2"), what), {})
    assert result.refused == 1
    assert what in result.lines[0]
    assert {(found.digest, found.stale, found.carried) for found in families(tree)} == {("d1", True, None)}


def cpp(digest, sources, machine_code):
    """Programs of an implementation whose C++ has other text, with what its kernels are compiled to."""
    key = "attention/fast"
    return programs_of(digest, sources={key: {"handler": sources}}, machine_code={key: machine_code})


def test_other_cpp_with_the_same_machine_code_is_carried(tree):
    before, after = (cpp(f"d{n}", f"c{n}", {"handler": ["m1", "m2"]}) for n in (1, 2))
    assert carrying.carry(before, after, {}).refused == 0
    assert {(found.digest, found.stale) for found in families(tree)} == {("d2", False)}


def test_the_cpp_of_calls_that_an_earlier_run_lowered_is_known():
    calls = {"flash, a": {"kernels": [["ejkernel_split_decode", "k1"], ["a_launch_of_triton", "k2"]]}}
    assert {name: path.name for name, path in sources_of(calls).items()} == {"ejkernel_split_decode": "split_decode.cu"}


@pytest.mark.parametrize("machine_code", [{}, {"handler": ["m1", "m3"]}, {"another": ["m1", "m2"]}])
def test_other_cpp_with_other_or_unknown_machine_code_is_not_carried(tree, machine_code):
    before, after = cpp("d1", "c1", {"handler": ["m1", "m2"]}), cpp("d2", "c2", machine_code)
    result = carrying.carry(before, after, {})
    assert (result.refused, "machine code" in result.lines[0]) == (1, True)


@pytest.mark.parametrize("what", ["new", "differs"])
def test_partial_leaves_the_tests_of_other_programs_as_not_run(tree, what, monkeypatch):
    tests = {"flash, b": [("test_b", True)], "flash, c": [("test_c", True)]}
    monkeypatch.setattr(carrying, "tests_of", lambda key, label, chip: tests[label])
    monkeypatch.setattr(carrying, "only_pinned", lambda key, label, chip: False)
    result = carrying.carry(programs_of("d1"), change(programs_of("d2"), what), {}, partial=True)
    assert result.refused == 0
    assert what in result.lines[0]
    left = "test_c" if what == "new" else "test_b"
    for found in families(tree):
        assert (found.digest, found.carried.programs) == ("d2", 2 if what == "new" else 1)
        assert found.operations["flash"] == Tally(passed=2, not_run=(left,))
        assert "not run" in evidence.not_confirmed_reason(found, "flash")


def test_new_calls_that_only_a_pinned_platform_gets_do_not_keep_it_from_being_confirmed(tree, monkeypatch):
    monkeypatch.setattr(carrying, "tests_of", lambda key, label, chip: [("test_c", True), ("test_refused", False)])
    monkeypatch.setattr(carrying, "only_pinned", lambda key, label, chip: True)
    carrying.carry(programs_of("d1"), change(programs_of("d2"), "new"), {}, partial=True)
    for found in families(tree):
        assert found.operations["flash"] == Tally(passed=3, left_out=("test_c",))
        assert evidence.not_confirmed_reason(found, "flash") == ""


def test_the_tests_of_a_call_are_known_by_its_label():
    found = dict(carrying.tests_of("tiled_attention/triton_latent", "mla_decode, no rotary part, bfloat16", "h200"))
    assert found["test_value[mla_decode-triton_latent-no rotary part, bfloat16]"]
    assert not any("model" in name and "candidates" not in name for name in found)


def test_programs_of_sources_that_no_chip_ran_carry_nothing(tree):
    assert carrying.carry(programs_of("d0"), programs_of("d2"), {}).refused == 1
    assert all(found.stale for found in families(tree))


def test_another_toolchain_is_an_error(tree):
    with pytest.raises(ValueError, match="toolchain"):
        carrying.carry(programs_of("d1"), programs_of("d2", toolchain={"jax": "0.12.0"}), {})


def test_a_renamed_implementation_takes_its_evidence_along(tree):
    tree.name("faster")
    after = programs_of("d2", "attention/faster")
    after["sources"]["attention/faster"] = {"handler_now": "c1"}
    carrying.carry(programs_of("d1"), after, {"fast": "faster", "handler": "handler_now"})
    assert not (tree.folder / "fast.json").exists()
    assert all(found.digest == "d2" for found in families(tree, "faster"))


def test_cases_that_are_new_keep_nothing_from_being_carried(tree):
    before = programs_of("d1", cases={"attention/fast": ["flash, a", "flash, b"]})
    result = carrying.carry(before, change(programs_of("d2"), "new"), {})
    assert (result.refused, families(tree)[0].carried) == (0, CarriedEvidence(digest="d1", programs=2))


def test_where_two_became_one_the_evidence_of_the_renamed_one_counts(tree):
    both = tuple(Confirmation(device="H", versions=x, at="1", families={"attention": FOUND}) for x in VERSIONS)
    narrow = msgspec.structs.replace(FOUND, digest="d0", operations={"flash": Tally(passed=1)})
    narrow = tuple(msgspec.structs.replace(one, families={"attention": narrow}) for one in both)
    for name, confirmations in (("wide", both), ("fast", narrow)):
        file = EvidenceFile(implementation=name, chip="sm_90", confirmations=confirmations)
        (tree.folder / f"{name}.json").write_bytes(evidence.encode(file))
    before = programs_of("d1", "attention/wide")
    for part in ("programs", "digests", "sources"):
        before[part]["attention/fast"] = {"programs": {}, "digests": "d0", "sources": {}}[part]
    result = carrying.carry(before, programs_of("d2"), {"wide": "fast"})
    assert "attention/fast: replaced by the evidence of attention/wide" in result.lines
    assert not (tree.folder / "wide.json").exists()
    assert all(found.operations == FOUND.operations and found.digest == "d2" for found in families(tree))


def test_the_command_says_what_differs(tree, tmp_path):
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    before.write_text(json.dumps(programs_of("d1")))
    after.write_text(json.dumps(change(programs_of("d2"), "differs")))
    result = CliRunner().invoke(main, ["carry", str(before), str(after)])
    assert result.exit_code == 1
    assert "differs: flash, b" in result.output


# --- what a program's hash covers ---


def hash_of(function, *shapes):
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return programs.summary(lambda: jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",)), set())


def product(x, y):
    return jnp.sin(x) @ jnp.cos(y)


def product_in_another_order(x, y):
    second = jnp.cos(y)
    return jax.jit(lambda z: jnp.sin(z))(x) @ second


def test_a_hash_is_about_what_is_computed_and_not_about_names_and_order():
    one = hash_of(product, (4, 8), (8, 4))
    assert hash_of(product_in_another_order, (4, 8), (8, 4)) == one
    assert hash_of(lambda x, y: jnp.sin(x) @ jnp.sin(y), (4, 8), (8, 4)) != one
    assert hash_of(lambda x, y: product(y, x), (8, 4), (4, 8)) != one


def loop(change_of_state):
    return lambda x: jax.lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, change_of_state(s[1])), (0, x))[1]


def test_a_hash_covers_the_bodies_of_loops():
    assert hash_of(loop(jnp.sin), (4,)) == hash_of(loop(lambda x: jnp.sin(x)), (4,))
    assert hash_of(loop(jnp.sin), (4,)) != hash_of(loop(jnp.cos), (4,))


def call(target, **attributes):
    shape = jax.ShapeDtypeStruct((4,), jnp.float32)
    return lambda x: jax.ffi.ffi_call(target, shape)(x, **attributes)


def test_a_hash_covers_what_ffi_calls_are_told():
    one, other = hash_of(call("handler", n=1), (4,)), hash_of(call("handler", n=2), (4,))
    assert one["kernels"][0][0] == "handler"
    assert one["kernels"] != other["kernels"]
    assert one["program"] != other["program"] != hash_of(call("another", n=2), (4,))["program"]


MODULE = """module {
  func.func @%s(%%arg0: i32 loc("q"(#loc3))) attributes {sym_name = "%s"} {
    %%%s = arith.addi %%arg0, %%arg0 : i32 loc(callsite(#loc1 at #loc(#loc2)))
    return %%%s : i32
  }
}
#loc1 = loc("/a/%s.py":1:2)
"""


def test_names_and_locations_of_kernels_do_not_count():
    first, second = (MODULE % ((name,) * 5) for name in ("forward", "run_forward"))
    assert programs.normalised(first) == programs.normalised(second)
    assert programs.normalised(first) != programs.normalised(first.replace("addi", "muli"))
    assert "loc" not in programs.normalised(first)
