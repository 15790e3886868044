"""Every refusal of the CUDA implementations names an argument of the operations that they serve, or a record field."""

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
FIELDS = {
    "queries": "query",
    "key": "key_pages",
    "key_cache": "key_pages",
    "kv_cache": "key_pages",
    "hidden_states": "x",
}
"""Arguments of some operations of a family -> the field of the record that all of them set."""


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


@pytest.mark.parametrize("folder", FOLDERS)
def test_each_refusal_names_an_argument_or_a_field_of_each_operation(folder):
    """The name of an argument that only some operations of a family have is in `FIELDS`, with what all of them set."""
    listed = registry().implementations.items()
    served = [name for name, found in listed for i in found if i.forward.startswith(f"ejkernel_cuda.{folder}.")]
    # What a chip lacks is a property of the device, not of an argument.
    names = {text.partition(":")[0] for text in refusals(folder) if not text.startswith("compute capability")}
    assert names
    assert served
    for op in map(registry().ops.get, served):
        understood = {field.name for kind in (op.arguments, op.family.record) for field in dataclasses.fields(kind)}
        assert {FIELDS.get(name, name) for name in names - understood} <= understood | {ANY_ARGUMENT}, op.name
