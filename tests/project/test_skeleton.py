"""Every kernel directory has the files of one skeleton: docs/extending/add_backend.md says what each is for."""

import importlib.util
import re
from pathlib import Path

import pytest

SKELETON_FILES = frozenset({"config", "spec", "plan", "forward", "backward", "forward_mode", "cases", "__init__"})
"""What a family's folder may hold beside `kernels/`; small families leave files out."""
PACKAGE_BY_BACKEND = {"xla": "ejkernel_xla", "cuda": "ejkernel_cuda"}
"""Backend -> the package whose folders with an `__init__.py` that registers are families."""


def family_folders(package):
    """The folders of a package's families."""
    (root,) = importlib.util.find_spec(package).submodule_search_locations
    return [path.parent for path in sorted(Path(root).glob("*/__init__.py"))]


@pytest.mark.parametrize("backend", PACKAGE_BY_BACKEND)
def test_a_family_has_the_files_of_the_skeleton_and_no_others(backend):
    found = family_folders(PACKAGE_BY_BACKEND[backend])
    assert found
    others = {
        f"{folder.name}/{path.name}"
        for folder in found
        for path in folder.iterdir()
        if path.name not in ("kernels", "__pycache__") and path.stem not in SKELETON_FILES
    }
    assert not others


@pytest.mark.parametrize("backend", PACKAGE_BY_BACKEND)
def test_a_family_registers_passes_that_are_where_the_skeleton_says(backend):
    package = PACKAGE_BY_BACKEND[backend]
    for folder in family_folders(package):
        text = (folder / "__init__.py").read_text(encoding="utf-8")
        assert "IMPLEMENTATIONS" in text or "def implementations()" in text, folder.name
        assert (folder / "forward.py").exists(), folder.name
        for line in text.splitlines():
            for name in ("forward", "backward"):
                if line.strip().startswith(f'{name}="'):
                    assert line.strip().partition('"')[2].split(":")[0].endswith(f".{name}"), (folder.name, line)


CPP = Path(__file__).parents[2] / "packages/ejkernel-cuda/csrc"
CPP_FOLDERS = sorted(path.name for path in CPP.iterdir() if path.is_dir())
INCLUDED = re.compile(r'^#include "(\w+)/[\w/.]+\.cuh"$', re.MULTILINE)
NAMESPACES = re.compile(r"^namespace (ejkernel[\w:]*) \{$", re.MULTILINE)


@pytest.mark.parametrize("folder", CPP_FOLDERS)
def test_a_folder_of_cuda_sources_is_one_namespace_and_mirrors_a_python_room(folder):
    namespace = "ejkernel" if folder == "common" else f"ejkernel::{folder}"
    assert folder == "common" or (CPP.parent / "src/ejkernel_cuda" / folder / "__init__.py").is_file()
    for path in sorted([*(CPP / folder).glob("*.cuh"), *(CPP / folder).glob("*.cu")]):
        text = path.read_text(encoding="utf-8")
        assert set(NAMESPACES.findall(text)) == {namespace}, path.name
        assert set(INCLUDED.findall(text)) <= {folder, "common"}, path.name


def test_cuda_sources_are_in_the_folders_of_families():
    assert {"common", "paged_decode", "selective_scan"} <= set(CPP_FOLDERS)
    assert not [path.name for path in CPP.iterdir() if path.suffix in (".cu", ".cuh", ".cpp")]
