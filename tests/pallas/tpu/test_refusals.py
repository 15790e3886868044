"""Every refusal of a TPU implementation names an argument of each operation that the implementation serves."""

import ast
import dataclasses
from pathlib import Path

import pytest

import ejkernel_pallas
from ejkernel.ops.plugins import registry
from ejkernel.ops.refusal_names import ARGUMENTS_OF_FIELDS, name_public_argument

TPU = Path(ejkernel_pallas.__file__).parent / "tpu"
FIELDS_OF_FEW_OPERATIONS = {
    *("compute_dtype", "pattern", "rhs_bias", "shared_prefix"),
    *("existing_out", "preferred_element_type", "{name}"),
}
"""Fields that are None in the records of the other operations; `{name}` loops over the last two."""
SERVED = [
    (name, i)
    for name, listed in registry().implementations.items()
    for i in listed
    if i.forward.startswith("ejkernel_pallas.tpu.")
]


def sentences(folder):
    """Yields each refusal that a folder yields or returns, with `{name}` for a variable."""
    tree = ast.parse((TPU / folder / "__init__.py").read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Yield | ast.Return) and isinstance(
            node.value, ast.Constant | ast.JoinedStr | ast.Tuple
        ):
            value = node.value.elts[0] if isinstance(node.value, ast.Tuple) and node.value.elts else node.value
            is_text = isinstance(value, ast.Constant) and isinstance(value.value, str)  # priorities are numbers
            if is_text or isinstance(value, ast.JoinedStr):
                pieces = value.values if isinstance(value, ast.JoinedStr) else [value]
                yield "".join(
                    str(x.value) if isinstance(x, ast.Constant) else f"{{{ast.unparse(x.value)}}}" for x in pieces
                )


@pytest.mark.parametrize(("name", "implementation"), SERVED, ids=[f"{name}-{i.name}" for name, i in SERVED])
def test_each_tpu_refusal_names_an_argument_of_its_operation(name, implementation):
    op = registry().ops[name]
    arguments = {field.name for field in dataclasses.fields(op.arguments)}
    named = [
        name_public_argument(op, sentence).partition(":")[0]
        for sentence in sentences(implementation.forward.split(".")[2])
    ]
    assert not [field for field in named if field not in arguments | FIELDS_OF_FEW_OPERATIONS]


def test_refusals_of_each_tpu_folder_are_found():
    """`latent_attention` refuses what the paged kernel refuses; two folders have no limits of their own."""
    folders = {i.forward.split(".")[2] for _, i in SERVED}
    assert {folder for folder in folders if not list(sentences(folder))} == {
        "collective_matmul",
        "latent_attention",
        "ring_attention",
    }


def test_renamed_fields_are_arguments_of_some_operation():
    arguments = {field.name for op in registry().ops.values() for field in dataclasses.fields(op.arguments)}
    assert {name for names in ARGUMENTS_OF_FIELDS.values() for name in names} <= arguments
