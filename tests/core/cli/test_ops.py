"""`ejkernel ops` and the page made of it: nothing that is registered is missing."""

import re
from pathlib import Path

import jax
import pytest

from ejkernel.cli.ops import distinguishing_fields, support_matrix
from ejkernel.cli.public_arguments import public_arguments
from ejkernel.ops.dispatch import can_compute
from ejkernel.ops.plugins import registry
from ejkernel.types.arguments import non_default_fields
from ejkernel_conformance.subjects import abstract_record

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.usefixtures("traced_cases")
PLUGIN = """
import dataclasses
from ejkernel.ops import Requires, hookimpl

@hookimpl
def ejkernel_implementations():
    from ejkernel_xla import ejkernel_implementations as others
    model = next(one for one in others() if one.family == "tiled_attention")
    requires = Requires(
        devices=frozenset({"nvidia"}), dtypes=frozenset({"bfloat16"}), handles=frozenset({"causal", "bias"}),
        modules=("acme",), min_compute_capability=9.0, head_dims=range(16, 257, 16),
    )
    backward = dataclasses.replace(requires, dtypes=frozenset({"float16"}), head_dims=frozenset({64}))
    gradients = frozenset({"query", "key", "value"})
    yield dataclasses.replace(
        model, name="acme", platform="acme", requires=requires, backward_requires=backward, gradients=gradients
    )
    yield dataclasses.replace(model, name="forward_only", requires=requires, backward=None, gradients=frozenset())
"""


def section(page: str, op: str) -> dict[str, list[str]]:
    """The rows of an operation's table by their first cell, or by the field of the record that it has in brackets."""
    text = re.search(rf"^## {op}\n(.*?)(?=^## |\Z)", page, re.M | re.S)
    assert text, op
    cells = [line[2:-2].split(" | ") for line in text[1].splitlines() if line.startswith("| ")]
    return {row[0].split("(`")[-1].strip("`)"): row[1:] for row in cells}


@pytest.fixture(scope="module")
def page(traced_cases) -> str:
    return support_matrix(registry())


def test_records_of_cases_are_those_of_the_conformance_suite(traced_cases):
    """The other tests of the page rely on it."""
    for name in ("flash_attention", "page_attention", "state_space_v1"):
        op = registry().ops[name]
        got, expected = (record(op, op.cases[0]) for record in (traced_cases, abstract_record))
        assert jax.tree.structure(got) == jax.tree.structure(expected)
        assert jax.tree.leaves(got) == jax.tree.leaves(expected)


@pytest.mark.parametrize("name", sorted(registry().ops))
def test_every_operation_is_there_with_everything_it_declares(page, name):
    op = registry().ops[name]
    records = [abstract_record(op, case) for case in op.cases]
    fields = {field for record in records for field in (*non_default_fields(record), *op.family.differentiable)}
    rows = section(page, name)
    listed = rows.pop("")
    implementations = [one for one in registry().implementations[name] if one.name in listed]
    assert listed == [one.name for one in implementations]
    assert rows["platform"] == [one.platform for one in implementations]
    for column, one in enumerate(implementations):
        told = {field: cells[column] for field, cells in rows.items()}
        assert set(one.requires.devices) == set(told["devices"].split(", "))
        assert set(one.requires.dtypes) == set(told["dtypes"].split(", "))
        assert {field for field, cell in told.items() if cell == "with gradient"} == one.gradients & told.keys()
        served = {field for field, cell in told.items() if cell in ("yes", "with gradient", "no gradient")}
        optional = fields - set(op.family.differentiable)
        assert served & optional == one.requires.handles & optional
    for argument, letters in op.axes.items():
        assert f"`{argument}[{letters}]`" in page
    overview = re.search(rf"^\| \[{name}\]\(#{name}\) \| (?P<names>[^|]*) \| (?P<gradient>\w+) \|", page, re.M)
    assert overview
    assert overview["names"] == ", ".join(one.name for one in implementations)
    assert overview["gradient"] == ("yes" if any(one.backward for one in implementations) else "no")


@pytest.mark.parametrize("name", sorted(registry().ops))
def test_an_operation_lists_those_that_serve_one_of_its_cases(page, name):
    op = registry().ops[name]
    listed = section(page, name)[""]
    for one in registry().implementations[name]:
        cases = (*op.cases, *one.cases_of(op))
        serves = any(can_compute(op.family, one, abstract_record(op, case), "forward") for case in cases)
        assert serves == (one.name in listed)


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("unified_attention", "| `v_scale` (`value_scale`) |"),
        ("flash_attention", "| `attention_mask`, `mask_info` (`mask`) |"),
        ("flash_attention", "| `softmax_aux` |"),
        ("state_space_v1", "| `dt` (`step`) |"),
        ("rwkv7", "| `r` (`query`) |"),
    ],
)
def test_a_row_names_the_public_argument_that_sets_a_field(page, name, row):
    assert row in re.search(rf"^## {name}\n(.*?)(?=^## |\Z)", page, re.M | re.S)[1]


@pytest.mark.parametrize("name", sorted(registry().ops))
def test_every_row_of_a_field_names_a_public_argument(page, name):
    op = registry().ops[name]
    for field in distinguishing_fields(op, registry().implementations[name]):
        assert public_arguments(op, field), field
        assert set(public_arguments(op, field)) <= set(op.signature.parameters)


@pytest.mark.parametrize("name", sorted(registry().ops))
def test_an_operation_has_a_tpu_kernel_or_a_note_says_why_not(page, name):
    """An operation whose TPU kernel is missing or gone must say why."""
    text = re.search(rf"^## {name}\n(.*?)(?=^## |\Z)", page, re.M | re.S)[1]
    listed = section(page, name)[""]
    implementations = [one for one in registry().implementations[name] if one.name in listed]
    has_kernel = any("tpu" in one.requires.devices for one in implementations if one.platform != "xla")
    assert ("Note: no kernel for TPUs: " in text) != has_kernel


def test_the_command_prints_the_page(run, page):
    assert run("ops").output == f"{page}\n"


def test_third_party_backends_have_a_column(run, install):
    install("ejkernel_acme_ops", PLUGIN)
    rows = section(run("ops").output, "flash_attention")
    columns = [n for n, name in enumerate(rows[""]) if name in ("acme", "forward_only", "xla")]
    rows = {field: [cells[n] for n in columns] for field, cells in rows.items()}
    assert rows["platform"] == ["acme", "xla", "xla"]
    assert rows["modules"][0] == "acme"
    assert rows["compute capability"][0] == "9.0"
    assert rows["dtypes"][0] == "bfloat16; backward float16"
    assert rows["head sizes"][0] == "16 to 256 in steps of 16; backward 64"
    assert rows["backward"] == ["own", "that of another implementation, if there is one", "own"]
    assert rows["causal"] == ["yes", "yes", "yes"]
    assert rows["query"] == ["with gradient", "no gradient", "with gradient"]
    assert rows["mask"] == ["no", "no", "yes"]


def test_the_site_build_generates_the_support_matrix():
    configuration = (ROOT / "mkdocs.yml").read_text()
    assert "support_matrix.md" in configuration
    assert "- .ci/docs_hooks.py" in configuration
    assert not (ROOT / "docs" / "support_matrix.md").exists()
