"""`docs/operations/paged_attention.md` names the operations that take an argument which not all of them take."""

import re
from pathlib import Path

from ejkernel.ops.plugins import registry

PAGE = Path(__file__).parents[4] / "docs" / "operations" / "paged_attention.md"
LATENT = {"multi_latent_ragged_page_attention", "multi_latent_ragged_page_attention_v2"}
OPERATIONS = {
    op.name: set(op.signature.parameters) for op in registry().ops.values() if op.family.name == "paged_attention"
}


def rows() -> dict[str, set[str]]:
    """Argument -> the operations that the page names for it."""
    table = PAGE.read_text().split("| argument | operations |")[1].split("\n\n")[0]
    found: dict[str, set[str]] = {}
    for arguments, operations in re.findall(r"^\| (`.*?) \| (.*?) \|$", table, re.M):
        named = set(re.findall(r"`(\w+)`", operations)) & OPERATIONS.keys()
        named |= LATENT if "latent" in operations else set()
        found |= {argument: named for argument in re.findall(r"`(\w+)`", arguments)}
    return found


def test_the_operations_named_for_an_argument_are_those_that_take_it():
    assert "q_scale" in rows()
    for argument, named in rows().items():
        assert named == {name for name, parameters in OPERATIONS.items() if argument in parameters}, argument
