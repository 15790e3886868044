"""Every refusal of the CUDA implementations names an argument of an operation that they serve."""

import ast
import dataclasses
from pathlib import Path

import pytest

import ejkernel_cuda
from ejkernel.ops.plugins import registry

FOLDERS = (
    "delta_rule",
    "dense_decode",
    "paged_decode",
    "quantized_matmul",
    "recurrent_step",
    "selective_scan",
    "tiled_attention",
)
ANY_ARGUMENT = "{name}"
"""A refusal that begins with a variable loops over names of arguments."""


def refusals(folder):
    """Yields the text of each refusal of a folder, with `{name}` for a variable."""
    source = Path(ejkernel_cuda.__file__).parent / folder / "__init__.py"
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Yield):
            values = node.value.values if isinstance(node.value, ast.JoinedStr) else [node.value]
            yield "".join(
                str(x.value) if isinstance(x, ast.Constant) else f"{{{ast.unparse(x.value)}}}" for x in values
            )


@pytest.mark.parametrize("folder", FOLDERS)
def test_each_refusal_names_an_argument(folder):
    listed = registry().implementations.items()
    served = {name for name, found in listed for i in found if i.forward.startswith(f"ejkernel_cuda.{folder}.")}
    arguments = {field.name for name in served for field in dataclasses.fields(registry().ops[name].arguments)}
    # What a chip lacks is a property of the device, not of an argument.
    names = [text.partition(":")[0] for text in refusals(folder) if not text.startswith("compute capability")]
    assert names
    assert not [name for name in names if name not in {*arguments, ANY_ARGUMENT}]
