"""Writes tutorials as notebooks that run on a CPU: `python .ci/make_notebooks.py [folder]`.

A notebook has the text and the Python of a page. The page is the source: a test compares them.
"""

import json
import re
import sys
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
TUTORIALS = ("quick_start", "packed_sequences", "serving")
BLOCK = re.compile(r"^```python\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
INSTALL = "With ejkernel [installed](../install.md), this notebook runs on a CPU. It is made from [the page]({}).\n"


def notebook(name: str) -> str:
    """Returns the notebook of a page as JSON."""
    text = re.sub(r"\]\((?!http|#)", "](../", (DOCS / f"{name}.md").read_text(encoding="utf-8"))
    text = re.sub(r"^\[Notebook\].*\n\n", "", text, flags=re.MULTILINE)
    cells = [_cell(n, kind, part) for n, (kind, part) in enumerate(_parts(name, text))]
    metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    content = {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def _parts(name: str, text: str) -> list[tuple[str, str]]:
    """Returns text and code of a page in their order, after a line that says where the notebook comes from."""
    title, text = text.split("\n\n", 1)
    parts = [("markdown", f"{title}\n\n{INSTALL.format(f'../{name}.md')}")]
    for n, part in enumerate(BLOCK.split(text)):
        if part.strip():
            parts.append(("code" if n % 2 else "markdown", part))
    return parts


def _cell(number: int, kind: str, text: str) -> dict[str, object]:
    cell: dict[str, object] = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}}
    if kind == "code":
        cell |= {"execution_count": None, "outputs": []}
    return cell | {"source": text.strip("\n").splitlines(keepends=True)}


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS / "notebooks"
    folder.mkdir(exist_ok=True)
    for name in TUTORIALS:
        (folder / f"{name}.ipynb").write_text(notebook(name), encoding="utf-8")
