"""The public operations are imported one by one, when they are used."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import ejkernel.modules
from ejkernel.modules import operations
from ejkernel.modules.exports import defining_module
from ejkernel.modules.operations import configs

OPERATIONS = "ejkernel.modules.operations"


def test_every_operation_module_is_listed_once():
    """The stub that type checkers read is the one list; `EXPORTS` comes from it."""
    folder = Path(operations.__file__).parent
    there = {path.stem for path in folder.glob("*.py") if "\nOP = " in path.read_text(encoding="utf-8")}
    assert set(operations.EXPORTS) == there
    names = [name for names in operations.EXPORTS.values() for name in names]
    assert sorted({*names, *configs.__all__, "create_default_executor"}) == ejkernel.modules.__all__
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", ejkernel.modules.__all__)
def test_a_name_is_what_its_module_defines(name):
    module = defining_module(name)
    assert module is not None
    assert getattr(ejkernel.modules, name) is getattr(importlib.import_module(module), name)


def test_the_list_of_operations_is_complete():
    assert len(operations.OPS) == len(operations.EXPORTS) == len({op.name for op in operations.OPS})
    for module, op in zip(operations.EXPORTS, operations.OPS, strict=True):
        assert importlib.import_module(f"{OPERATIONS}.{module}").OP is op
        assert op.function.__name__ in operations.EXPORTS[module]
        assert op.function.__module__ == f"{OPERATIONS}.{module}"


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
