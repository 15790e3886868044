"""Every kernel directory of the Triton backend has the one skeleton, so that its files are found by their names."""

import ast
from pathlib import Path

import pytest

import ejkernel_triton

ROOT = Path(ejkernel_triton.__file__).parent
DATA = {"tuned", "evidence", "__pycache__"}
SUBFAMILIES = {
    "cross_entropy": {"ordered"},
    "linear_recurrence": {"chunked", "delta", "decode", "low_rank", "segments", "steps"},
    "paged_attention": {"cache_write", "fixed_splits", "latent"},
    "quantized_matmul": {"ordered"},
    "selective_scan": {"decode"},
}
"""Directories in a family's directory that have the skeleton themselves."""

PASSES = {"forward.py", "backward.py", "forward_mode.py"}
SKELETON = PASSES | {"__init__.py", "config.py", "spec.py", "plan.py", "kernels", "cases.py"}


def _directories():
    families = sorted(path for path in ROOT.iterdir() if path.is_dir() and path.name not in DATA)
    inner = [family / name for family in families for name in sorted(SUBFAMILIES.get(family.name, ()))]
    return [*families, *inner]


DIRECTORIES = _directories()


def _kernels(file):
    """Names of the kernels that a file defines: functions that Triton compiles and that are launched."""
    functions = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)]
    return [x.name for x in functions if x.decorator_list and x.name.endswith("_kernel")]


@pytest.mark.parametrize("folder", DIRECTORIES, ids=lambda folder: str(folder.relative_to(ROOT)))
def test_a_kernel_directory_has_the_files_of_the_skeleton_alone(folder):
    names = {path.name for path in folder.iterdir()} - {"__pycache__"}
    assert names <= SKELETON | SUBFAMILIES.get(folder.name, set()), names
    assert "__init__.py" in names


@pytest.mark.parametrize("folder", DIRECTORIES, ids=lambda folder: str(folder.relative_to(ROOT)))
def test_a_file_has_one_kernel_and_its_name(folder):
    for file in sorted((folder / "kernels").glob("*.py")):
        assert _kernels(file) in ([], [f"{file.stem}_kernel"]), file
    for file in folder.glob("*.py"):
        assert "import triton\n" not in file.read_text(), file
        assert not _kernels(file), file


def test_files_begin_with_a_docstring():
    for file in ROOT.rglob("*.py"):
        assert file.read_text().lstrip("r").startswith('"""'), file


def test_every_kernel_is_in_a_kernels_directory():
    found = {file for file in ROOT.rglob("*.py") if _kernels(file)}
    assert found
    assert {file.parent.name for file in found} == {"kernels"}
