"""The README's table of operations by backend, from what the installed backends declare and the evidence they ship.

python tests/project/readme_table.py          # prints it
python tests/project/readme_table.py --write  # puts it into the README
"""

import re
import sys
import tomllib
from pathlib import Path

from ejkernel.cli.ops import support_matrix
from ejkernel.ops import evidence
from ejkernel.ops.model import Implementation
from ejkernel.ops.plugins import registry

ROOT = Path(__file__).parents[2]
PATTERN_BY_COLUMN = {
    "XLA": r"xla$",
    "Triton": r"triton",
    "Mosaic GPU": r"mosaic_gpu",
    "CUDA, cuDNN": r"cuda|cudnn$",
    "TPU": r"mosaic_tpu",
}
MATRIX_ROW = re.compile(r"^\| \[`?(\w+)`?\]\([^)]*\) \| ([\w, ]+) \|", re.MULTILINE)
CHOSEN_MARK, ONLY_PINNED_MARK = "●", "○"


def marks_by_operation() -> dict[str, tuple[str, ...]]:
    """Returns a mark per column for each operation: chosen by dispatch somewhere, only with `platform=`, or none."""
    found = registry()
    marks: dict[str, tuple[str, ...]] = {}
    for name, served in MATRIX_ROW.findall(support_matrix(found)):
        listed = [i for i in found.implementations[name] if i.name in served.split(", ")]
        columns = ([i for i in listed if re.match(pattern, i.name)] for pattern in PATTERN_BY_COLUMN.values())
        marks[name] = tuple(_mark(name, column) for column in columns)
    return marks


def _mark(op: str, column: list[Implementation]) -> str:
    """Returns the mark of a column with these implementations."""
    return "" if not column else CHOSEN_MARK if any(_is_chosen(op, one) for one in column) else ONLY_PINNED_MARK


def _is_chosen(op: str, one: Implementation) -> bool:
    """Returns whether dispatch chooses it somewhere: priority 0 or more, and confirmed on a chip if it needs evidence.

    Stale evidence counts here: no release has any.
    """
    needed = one.evidence is not None and "tpu" not in one.requires.devices
    confirmed = any(not found.problem or found.stale for found in evidence.evidence_summaries(one, op))
    return (one.constant_priority is None or one.constant_priority >= 0) and (confirmed or not needed)


def table() -> str:
    """Returns the table in Markdown: a row per operation with a link to its page, grouped as in the navigation."""
    marks = marks_by_operation()
    rows = (f"| [`{name}`](docs/{page}) | {' | '.join(marks[name])} |\n" for name, page in pages().items())
    return f"| operation | {' | '.join(PATTERN_BY_COLUMN)} |\n|---|{':-:|' * len(PATTERN_BY_COLUMN)}\n" + "".join(rows)


def pages() -> dict[str, str]:
    """Returns the page of each operation, in the order of the navigation."""
    groups = tomllib.loads((ROOT / ".ci/operation_pages.toml").read_text())
    return {name: page for group in groups.values() for name, page in group.items()}


if __name__ == "__main__":
    if "--write" in sys.argv:
        readme = ROOT / "README.md"
        text = re.sub(r"^\| operation \|.*?\n\n", lambda _: f"{table()}\n", readme.read_text(), flags=re.M | re.S)
        readme.write_text(text)
    else:
        print(table(), end="")
