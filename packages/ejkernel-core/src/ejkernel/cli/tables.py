"""Prints tables, decisions and text."""

import os
import sys
import textwrap
from collections.abc import Container, Iterable, Sequence
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ejkernel.ops.dispatch import Choice, Decision
from ejkernel.ops.params import set_fields_as_text
from ejkernel.suggestion import did_you_mean

UNLIMITED_WIDTH = 1 << 16  # where the output has no known width: lines in a file, a pipe or a log are not broken
GAP = 3  # columns between the cells of a table
STATUS_COLORS = {"chosen": "bold green", "usable": "green", "refused": "red"}


def open_console(stderr: bool = False) -> Console:
    """Opens a console for one command, because tests and pipes replace the standard streams.

    Args:
        stderr: Whether on the standard error, because the standard output is for JSON.
    """
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else _width_without_terminal()
    return Console(width=width, highlight=False, stderr=stderr)


def _width_without_terminal() -> int:
    """Returns the width that COLUMNS names; a value that is no width, such as an empty one, counts as unset."""
    columns = os.environ.get("COLUMNS", "")
    return (columns.isdecimal() and int(columns)) or UNLIMITED_WIDTH


def print_table(
    out: Console,
    title: str,
    *columns: str,
    rows: Iterable[Iterable[Any]] = (),
    right_aligned_columns: Iterable[str] = (),
    folded_columns: Iterable[str] = (),
) -> None:
    """Prints a table of plain values; the text of its cells is printed as it is.

    Cells are never broken, but for sentences, and those between words alone. A table that is too wide for that is
    printed as a list: names can be found and copied at any width.

    Args:
        out: Where to.
        title: Line above the table; empty for none.
        *columns: Headings.
        rows: Cells; a `(text, style)` pair is coloured.
        right_aligned_columns: Headings of columns that hold numbers.
        folded_columns: Headings of columns that hold sentences.
    """
    cells = [[_cell_text(value) for value in row] for row in rows]
    sentences, numbers = set(folded_columns), set(right_aligned_columns)
    if title:
        print_unmarked_text(out, title, "bold")
    if _min_table_width(columns, cells, sentences) > out.width:
        _print_as_paragraphs(out, columns, cells)
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in columns:
        justify = "right" if column in numbers else "left"
        table.add_column(column, no_wrap=column not in sentences, justify=justify)
    for row in cells:
        table.add_row(*row)
    out.print(table)
    out.print()


def _min_table_width(columns: Sequence[str], rows: Sequence[Sequence[Text]], folded_columns: Container[str]) -> int:
    """Computes the least width of a table: its longest cells, and the longest words of its sentences."""
    widths = [GAP * (len(columns) - 1)]
    for number, column in enumerate(columns):
        texts = [column, *(row[number].plain for row in rows)]
        words = [piece for text in texts for piece in (text.split() if column in folded_columns else text.splitlines())]
        widths.append(max(map(cell_len, words), default=0))
    return sum(widths)


def _print_as_paragraphs(out: Console, columns: Sequence[str], rows: Sequence[Sequence[Text]]) -> None:
    """Prints rows as paragraphs: the first cell, if it has changed, and the others with their headings."""
    wrapper = textwrap.TextWrapper(width=max(out.width, 20), initial_indent="  ", subsequent_indent="    ")
    wrapper.break_long_words = wrapper.break_on_hyphens = False
    for first, *others in rows:
        if first.plain:
            out.print(first, soft_wrap=True)
        named = zip(columns[1:], others, strict=True)
        named_cells = [f"{heading} {' '.join(cell.plain.split())}".strip() for heading, cell in named if cell.plain]
        for line in wrapper.wrap("; ".join(named_cells)):
            out.print(Text(line), soft_wrap=True)
    out.print()


def print_decision(out: Console, decision: Decision) -> None:
    """Prints both directions of a decision."""
    print_choice(out, decision.forward)
    if decision.differentiated_forward is not None:
        print_unmarked_text(out, "If the call is differentiated, another implementation runs its forward pass:")
        print_choice(out, decision.differentiated_forward)
    print_choice(out, decision.backward)


def print_choice(out: Console, choice: Choice) -> None:
    """Prints the verdicts of one direction, and where its configuration came from."""
    rows = [
        (v.implementation.name, v.implementation.platform, "by call" if v.priority is None else v.priority,
         (v.status, STATUS_COLORS[v.status]), v.remarks)
        for v in choice.verdicts
    ]  # fmt: skip
    title = f"{choice.op}, {choice.direction}, on {choice.device}"
    headings = ("implementation", "platform", "priority", "verdict", "remarks")
    print_table(out, title, *headings, rows=rows, right_aligned_columns=["priority"], folded_columns=["remarks"])
    if choice.platform not in ("auto", *(v.implementation.platform for v in choice.verdicts)):
        question = did_you_mean(choice.platform, {v.implementation.platform for v in choice.verdicts})
        print_unmarked_text(
            out, f"No installed backend has an implementation for platform {choice.platform!r}{question}"
        )
    for note in choice.notes:
        print_unmarked_text(out, f"Note: {note}.")
    for plugin in choice.failed_plugins:
        print_unmarked_text(out, f"Plugin {plugin.name} ({plugin.distribution}) did not load: {plugin.error}", "red")
    if choice.implementation is None:
        print_unmarked_text(out, f"No implementation supports the {choice.direction} pass.\n", "red")
        return
    print_unmarked_text(out, f"Configuration from {choice.tier}: {set_fields_as_text(choice.config)}")
    for step in choice.trail:
        print_unmarked_text(out, f"  {step}", "dim")
    out.print()


def print_unmarked_text(out: Console, text: str, style: str = "") -> None:
    """Prints text that may hold square brackets, which rich would read as markup; its lines are left whole."""
    out.print(Text(text), style=style or None, soft_wrap=True)


def format_milliseconds(seconds: float) -> str:
    """Formats seconds as milliseconds, with at least three significant digits."""
    value = seconds * 1e3
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def format_megabytes(size: int | None) -> str:
    """Formats bytes as megabytes."""
    return "unknown" if size is None else f"{size / 1e6:.1f}"


def _cell_text(value: Any) -> Text:
    text, style = value if isinstance(value, tuple) else (value, None)
    return Text(str(text), style=style or "")
