"""Packages of core import what is below them, and no module of any distribution imports itself by way of others."""

import ast
import functools
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

LAYERS = ("types", "planning", "families", "ops", "modules", "compat", "cli")
"""Packages of core, each of which imports only itself, those before it, and single modules such as `errors`."""


PACKAGES = ("ejkernel", "ejkernel_conformance", "ejkernel_xla", "ejkernel_triton", "ejkernel_pallas", "ejkernel_cuda")


def _package_folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


@functools.cache
def _module_files(package: str = "ejkernel") -> dict[str, Path]:
    """Modules of a package by name."""
    root = _package_folder(package)
    named = {path.relative_to(root.parent).with_suffix("").parts: path for path in root.rglob("*.py")}
    return {".".join(parts[:-1] if parts[-1] == "__init__" else parts): path for parts, path in named.items()}


def _executed_imports(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """The imports below a node that run, those within functions included; type checkers read the others alone."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)):
            yield from _executed_imports(child)


@functools.cache
def _imported_modules(package: str = "ejkernel") -> dict[str, frozenset[str]]:
    """Module -> modules of the same package that it imports."""
    files = _module_files(package)
    found: dict[str, set[str]] = {name: set() for name in files}
    for name, path in files.items():
        for statement in _executed_imports(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(statement, ast.ImportFrom):
                base = statement.module or ""
                paths = [f"{base}.{alias.name}" for alias in statement.names]
                found[name] |= {path if path in files else base for path in paths}
            else:
                found[name] |= {alias.name for alias in statement.names}
    return {name: frozenset(paths & files.keys()) - {name} for name, paths in found.items()}


def _imports_at_depth(package: str, depth: int) -> dict[str, set[str]]:
    """The imports between packages and modules that are named by so many words, parents and children left out."""
    short: dict[str, set[str]] = {}
    for name, paths in _imported_modules(package).items():
        importer = ".".join(name.split(".")[:depth])
        imported = {".".join(path.split(".")[:depth]) for path in paths}
        kin = {x for x in imported if f"{x}.".startswith(f"{importer}.") or f"{importer}.".startswith(f"{x}.")}
        short.setdefault(importer, set()).update(imported - kin)
    return short


def _nodes_of_cycles(graph: dict[str, set[str]]) -> set[str]:
    """What is left of a graph when all nodes are removed that import, or are imported by, no remaining one."""
    left = set(graph)
    while left:
        imported = set().union(*(graph[name] for name in left)) & left
        keep = {name for name in imported if graph[name] & left}
        if keep == left:
            break
        left = keep
    return left


@pytest.mark.parametrize("package", PACKAGES)
def test_no_package_and_no_module_imports_itself_by_way_of_others(package):
    for depth in range(2, 7):
        assert not _nodes_of_cycles(_imports_at_depth(package, depth))


@pytest.mark.parametrize("package", LAYERS)
def test_a_package_imports_only_those_below_it(package):
    above = set(LAYERS[LAYERS.index(package) + 1 :])
    wrong = {
        f"{name} imports {path}"
        for name, paths in _imported_modules().items()
        for path in paths
        if name.startswith(f"ejkernel.{package}.") and path.split(".")[1:2] and path.split(".")[1] in above
    }
    assert not wrong


def test_errors_import_no_other_module():
    assert not _imported_modules()["ejkernel.errors"]


def test_an_import_cycle_is_found():
    assert _nodes_of_cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == {"b", "c"}
