"""Distributions that exist for a test: a module, and the metadata by which entry points are found."""

import sys
from pathlib import Path

import pytest


def add_distribution(
    monkeypatch: pytest.MonkeyPatch, folder: Path, module: Path, source: str, entry_point: str
) -> None:
    """Writes a module into a folder and puts the folder on the path, as if its distribution were installed.

    Args:
        monkeypatch: Takes the folder from the path after the test.
        folder: The folder, which may not exist.
        module: The module's file in the folder, `name.py` or `name/__init__.py`.
        source: Its text.
        entry_point: The text of `entry_points.txt`: a group in brackets, and a line of it.
    """
    name = module.parts[0].removesuffix(".py")
    metadata = folder / f"{name}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"{entry_point}\n")
    (folder / module).parent.mkdir(exist_ok=True)
    (folder / module).write_text(source)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, name, raising=False)
