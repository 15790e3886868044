"""The public operations are imported one by one, when they are used."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import ejkernel.modules
from ejkernel.modules import operations

OPERATIONS = "ejkernel.modules.operations"


def declared() -> dict[str, str]:
    """What type checkers read: public name -> module, from the imports under `if TYPE_CHECKING`."""
    assert ejkernel.modules.__file__ is not None
    tree = ast.parse(Path(ejkernel.modules.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    return {
        alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }  # fmt: skip


def test_type_checkers_and_the_table_see_the_same_names():
    names = declared()
    assert sorted(names) == sorted(ejkernel.modules.__all__)
    table = {name: f"{OPERATIONS}.{module}" for module, names in operations.EXPORTS.items() for name in names}
    rest = {name: names[name] for name in names.keys() - table.keys()}
    assert {name: names[name] for name in table} == table
    assert set(rest.values()) == {f"{OPERATIONS}.configs", "ejkernel.ops.execution.executor"}


@pytest.mark.parametrize("name", ejkernel.modules.__all__)
def test_a_name_is_what_its_module_defines(name):
    assert getattr(ejkernel.modules, name) is getattr(importlib.import_module(declared()[name]), name)


def test_the_list_of_operations_is_complete():
    assert len(operations.OPS) == len(operations.EXPORTS) == len({op.name for op in operations.OPS})
    for module, op in zip(operations.EXPORTS, operations.OPS, strict=True):
        assert importlib.import_module(f"{OPERATIONS}.{module}").OP is op
        assert op.function.__name__ in operations.EXPORTS[module]
        assert getattr(operations, module).OP is op


def test_what_does_not_exist_is_an_attribute_error():
    for module in (ejkernel.modules, operations):
        with pytest.raises(AttributeError, match=r"module 'ejkernel\.modules.*' has no attribute 'flush_attention'"):
            module.flush_attention  # noqa: B018
    assert "flash_attention" in dir(ejkernel.modules)
    assert "flash_attention" in dir(operations)


@pytest.mark.parametrize("operation", ["flash_attention", "mean_pooling"])
def test_importing_one_operation_imports_no_other(operation):
    script = f"import sys; from ejkernel.modules import {operation}; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    others = {f"{OPERATIONS}.{name}" for name in operations.EXPORTS if name != operation}
    assert f"{OPERATIONS}.{operation}" in found
    assert others.isdisjoint(found)
