"""Every kernel directory of the Pallas backend has the one skeleton, so that its files are found by their names."""

import ast
from pathlib import Path

import pytest

import ejkernel_pallas

ROOT = Path(ejkernel_pallas.__file__).parent
TOOLKITS = {"hopper", "mosaic", "profile", "__pycache__"}
SKELETON = {"__init__.py", "config.py", "spec.py", "plan.py", "forward.py", "backward.py", "kernels", "cases.py"}
PACKAGES = {("gpu", "tiled_attention"): {"plan"}, ("gpu", "paged_attention"): {"plan"}}
"""Parts of the skeleton that are packages instead of modules, as they have several things to compute."""

DIRECTORIES = sorted(
    path
    for device in ("gpu", "tpu")
    for path in (ROOT / device).iterdir()
    if path.is_dir() and path.name not in TOOLKITS and (path / "__init__.py").exists()
)


def _label(folder):
    return f"{folder.parent.name}-{folder.name}"


def _public(file):
    """Public functions and classes that a file defines."""
    nodes = ast.parse(file.read_text()).body
    return {x.name for x in nodes if isinstance(x, ast.FunctionDef | ast.ClassDef) and not x.name.startswith("_")}


def test_all_families_are_seen():
    assert len(DIRECTORIES) >= 11


@pytest.mark.parametrize("folder", DIRECTORIES, ids=_label)
def test_a_kernel_directory_has_the_files_of_the_skeleton_alone(folder):
    names = {path.name for path in folder.iterdir()} - {"__pycache__"}
    assert names <= SKELETON | PACKAGES.get((folder.parent.name, folder.name), set())
    assert {"__init__.py", "forward.py"} <= names


@pytest.mark.parametrize("folder", DIRECTORIES, ids=_label)
def test_passes_are_where_their_names_say(folder):
    assert "implementations" in _public(folder / "__init__.py")
    assert "forward" in _public(folder / "forward.py")
    backward = folder / "backward.py"
    assert not backward.exists() or "backward" in _public(backward)


@pytest.mark.parametrize("folder", DIRECTORIES, ids=_label)
def test_registering_imports_no_kernel(folder):
    """Listing implementations imports nothing of Pallas: a machine without the device gets a refusal that says so."""
    for node in ast.walk(ast.parse((folder / "__init__.py").read_text())):
        if isinstance(node, ast.ImportFrom):
            assert ".kernels" not in (node.module or "")
            assert not (node.module or "").startswith("jax.experimental")


def test_files_begin_with_what_they_are():
    for file in ROOT.rglob("*.py"):
        assert file.read_text().startswith('"""'), file
