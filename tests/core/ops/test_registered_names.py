"""Implementations name their functions as `module:function`; each of these functions is in its module."""

import ast
import importlib.util
from pathlib import Path

import pytest

from ejkernel.ops.plugins import registry

IMPLEMENTATIONS = {(i.family, i.name): i for listed in registry().implementations.values() for i in listed}


def _defined(module):
    """The names that a module defines or imports; it is not imported itself, as its toolchain may not be installed."""
    spec = importlib.util.find_spec(module)
    assert spec is not None, module
    assert spec.origin is not None, module
    for node in ast.walk(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.ImportFrom | ast.Import):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))


def test_verdicts_on_implementations_can_be_cached():
    """A dictionary among its fields left implementations without a hash, so dispatch on a GPU raised TypeError."""
    assert any(one.instead_of_kernel for one in IMPLEMENTATIONS.values())
    assert len(set(IMPLEMENTATIONS.values())) == len(IMPLEMENTATIONS)


@pytest.mark.parametrize("key", sorted(IMPLEMENTATIONS), ids="-".join)
def test_functions_named_by_implementations_exist(key):
    implementation = IMPLEMENTATIONS[key]
    for name in (implementation.forward, implementation.backward, implementation.cases):
        if name is not None:
            module, _, function = name.partition(":")
            assert function in set(_defined(module)), name
