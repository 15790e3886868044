"""The README's table of operations by backend, from what the installed backends declare and the evidence they ship.

python tests/project/readme_table.py          # prints it
python tests/project/readme_table.py --write  # puts it into the README
"""

import re
import sys
from pathlib import Path

from ejkernel.cli.ops import support_matrix
from ejkernel.ops import evidence
from ejkernel.ops.model import Implementation
from ejkernel.ops.plugins import registry

COLUMNS = {
    "XLA": r"xla$",
    "Triton": r"triton",
    "Mosaic GPU": r"mosaic_gpu",
    "CUDA, cuDNN": r"cuda|cudnn$",
    "TPU": r"pallas_tpu",
}
ROW = re.compile(r"^\| \[`?(\w+)`?\]\([^)]*\) \| ([\w, ]+) \|", re.MULTILINE)
CHOSEN, ASKED = "●", "○"


def support() -> dict[str, tuple[str, ...]]:
    """For every operation a mark for each column: chosen by dispatch somewhere, only with `platform=`, or none."""
    found = registry()
    marks: dict[str, tuple[str, ...]] = {}
    for name, served in ROW.findall(support_matrix(found)):
        listed = [i for i in found.implementations[name] if i.name in served.split(", ")]
        columns = ([i for i in listed if re.match(pattern, i.name)] for pattern in COLUMNS.values())
        marks[name] = tuple(_mark(name, column) for column in columns)
    return marks


def _mark(op: str, column: list[Implementation]) -> str:
    """The mark of a column with these implementations."""
    return "" if not column else CHOSEN if any(_is_chosen(op, one) for one in column) else ASKED


def _is_chosen(op: str, one: Implementation) -> bool:
    """Whether dispatch chooses it somewhere: not below XLA's 0, and confirmed on some chip where that is asked for.

    Stale evidence counts here: no release has any.
    """
    needed = one.evidence is not None and "tpu" not in one.requires.devices
    confirmed = any(not found.problem or found.stale for found in evidence.summaries(one, op))
    return one.priority >= 0 and (confirmed or not needed)


def table() -> str:
    """Markdown: operations with the same marks share a row."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for name, marks in support().items():
        rows.setdefault(marks, []).append(f"`{name}`")
    ordered = sorted(rows.items(), key=lambda row: (-sum(map(bool, row[0])), row[1]))
    head = f"| operation | {' | '.join(COLUMNS)} |\n|---|{':-:|' * len(COLUMNS)}\n"
    return head + "".join(f"| {', '.join(names)} | {' | '.join(marks)} |\n" for marks, names in ordered)


if __name__ == "__main__":
    if "--write" in sys.argv:
        readme = Path(__file__).parents[2] / "README.md"
        text = re.sub(r"^\| operation \|.*?\n\n", lambda _: f"{table()}\n", readme.read_text(), flags=re.M | re.S)
        readme.write_text(text)
    else:
        print(table(), end="")
