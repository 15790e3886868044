"""The page "Coming from upstream", made from the list in `upstream.toml`."""

import tomllib
from pathlib import Path
from typing import Any

INTRODUCTION = """# Coming from upstream

Code written for the earlier library of this name keeps its imports where the first table has them. The second says what
replaces the rest, the third what the same call means here.
"""


def names() -> dict[str, Any]:
    """The list: `same`, `instead` and `difference`."""
    return tomllib.loads(Path(__file__).with_name("upstream.toml").read_text(encoding="utf-8"))


def upstream_page() -> str:
    """The page, as Markdown."""
    listed = names()
    same = [(f"`{module}`", ", ".join(f"`{name}`" for name in found)) for module, found in listed["same"].items()]
    instead = [(f"`{name}`", use) for name, use in listed["instead"].items()]
    differences = [(entry["topic"], entry["upstream"], entry["here"]) for entry in listed["difference"]]
    parts = [
        INTRODUCTION,
        _table("## The same names", ("from", "import"), same),
        _table("## Other names", ("upstream", "instead"), instead),
        _table("## Other meanings", ("of", "upstream", "here"), differences),
    ]
    return "\n".join(parts)


def _table(title: str, head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [title, "", f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows), ""])
