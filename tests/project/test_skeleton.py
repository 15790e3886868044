"""Every kernel directory has the files of one skeleton: docs/extending/add_backend.md says what each is for."""

import importlib.util
from pathlib import Path

import pytest

FILES = frozenset({"config", "spec", "plan", "forward", "backward", "cases", "__init__"})
"""What a family's folder may hold beside `kernels/`; small families leave files out."""
FAMILIES = {"xla": "ejkernel_xla", "cuda": "ejkernel_cuda"}
"""Backend -> the package whose folders with an `__init__.py` that registers are families."""


def folders(package):
    """The folders of a package's families."""
    (root,) = importlib.util.find_spec(package).submodule_search_locations
    return [path.parent for path in sorted(Path(root).glob("*/__init__.py"))]


@pytest.mark.parametrize("backend", FAMILIES)
def test_a_family_has_the_files_of_the_skeleton_and_no_others(backend):
    found = folders(FAMILIES[backend])
    assert found
    others = {
        f"{folder.name}/{path.name}"
        for folder in found
        for path in folder.iterdir()
        if path.name not in ("kernels", "__pycache__") and path.stem not in FILES
    }
    assert not others


@pytest.mark.parametrize("backend", FAMILIES)
def test_a_family_registers_passes_that_are_where_the_skeleton_says(backend):
    package = FAMILIES[backend]
    for folder in folders(package):
        text = (folder / "__init__.py").read_text(encoding="utf-8")
        assert "IMPLEMENTATIONS" in text or "def implementations()" in text, folder.name
        assert (folder / "forward.py").exists(), folder.name
        for line in text.splitlines():
            for name in ("forward", "backward"):
                if line.strip().startswith(f'{name}="'):
                    assert line.strip().partition('"')[2].split(":")[0].endswith(f".{name}"), (folder.name, line)
