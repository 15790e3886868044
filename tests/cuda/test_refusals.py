"""Every refusal of the CUDA implementations names an argument of the operation that is called."""

import ast
import dataclasses
from pathlib import Path

import pytest

import ejkernel_cuda
from ejkernel.ops.plugins import registry
from ejkernel.ops.refusal_names import name_public_argument

FOLDERS = (
    "delta_rule",
    "dense_decode",
    "paged_codes",
    "paged_decode",
    "quantized_matmul",
    "recurrent_step",
    "selective_scan",
    "tiled_attention",
)
ANY_ARGUMENT = "{name}"
"""A refusal that begins with a variable loops over names of arguments."""
FIELDS_OF_FEW_OPERATIONS = {"beta", "bias", "block_tables", "parents"}
"""Fields that are None in the records of the other operations, which the kernels refuse, or never see."""


def refusals(folder):
    """Yields the text of each refusal of a folder, with `{name}` for a variable."""
    source = Path(ejkernel_cuda.__file__).parent / folder / "__init__.py"
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Yield):
            values = node.value.values if isinstance(node.value, ast.JoinedStr) else [node.value]
            assert isinstance(node.value, ast.JoinedStr | ast.Constant), ast.unparse(node)
            yield "".join(
                str(x.value) if isinstance(x, ast.Constant) else f"{{{ast.unparse(x.value)}}}" for x in values
            )


def served(folder):
    """The operations that the implementations of a folder serve."""
    prefix = f"ejkernel_cuda.{folder}."
    return [
        op for op, listed in registry().implementations.items() if any(i.forward.startswith(prefix) for i in listed)
    ]


@pytest.mark.parametrize(("folder", "name"), [(folder, name) for folder in FOLDERS for name in served(folder)])
def test_each_refusal_names_an_argument_of_each_operation(folder, name):
    op = registry().ops[name]
    arguments = {field.name for field in dataclasses.fields(op.arguments)}
    # What a chip lacks is a property of the device, not of an argument.
    texts = [text for text in refusals(folder) if not text.startswith("compute capability")]
    assert texts
    names = [name_public_argument(op, text).partition(":")[0] for text in texts]
    assert not [name for name in names if name not in {*arguments, ANY_ARGUMENT, *FIELDS_OF_FEW_OPERATIONS}]
