"""The README's table of operations by backend, from what the installed backends declare: `python readme_table.py`."""

import re

from ejkernel.cli.ops import support_matrix
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
    """For every operation a mark for each column: chosen by dispatch, only where `platform=` asks, or none."""
    found = registry()
    marks: dict[str, tuple[str, ...]] = {}
    for name, served in ROW.findall(support_matrix(found)):
        ranks = {i.name: i.priority for i in found.implementations[name] if i.name in served.split(", ")}
        marks[name] = tuple(
            _mark([rank for served, rank in ranks.items() if re.match(pattern, served)]) for pattern in COLUMNS.values()
        )
    return marks


def _mark(priorities: list[int]) -> str:
    """The mark of a column whose implementations have these priorities: below XLA's 0, dispatch does not choose one."""
    return "" if not priorities else CHOSEN if max(priorities) >= 0 else ASKED


def table() -> str:
    """Markdown: operations with the same marks share a row."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for name, marks in support().items():
        rows.setdefault(marks, []).append(f"`{name}`")
    ordered = sorted(rows.items(), key=lambda row: (-sum(map(bool, row[0])), row[1]))
    head = f"| operation | {' | '.join(COLUMNS)} |\n|---|{':-:|' * len(COLUMNS)}\n"
    return head + "".join(f"| {', '.join(names)} | {' | '.join(marks)} |\n" for marks, names in ordered)


if __name__ == "__main__":
    print(table(), end="")
