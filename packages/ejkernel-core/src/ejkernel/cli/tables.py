"""What the commands print."""

import os
import sys
from collections.abc import Iterable
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ejkernel.ops.config.params import given_values
from ejkernel.ops.dispatch import Choice, Decision

WIDTH = 120  # where no terminal says how wide it is: a file, a pipe, a build log
COLORS = {"chosen": "bold green", "usable": "green", "refused": "red"}


def console() -> Console:
    """Where to print; made anew by each command, because tests and pipes replace the standard output."""
    width = None if sys.stdout.isatty() else int(os.environ.get("COLUMNS", WIDTH))
    return Console(width=width, highlight=False)


def print_table(
    out: Console, title: str, *columns: str, rows: Iterable[Iterable[Any]] = (), right: Iterable[str] = ()
) -> None:
    """Prints a table of plain values; the text of its cells is printed as it is.

    Args:
        out: Where to.
        title: Line above the table; empty for none.
        *columns: Headings.
        rows: Cells; a `(text, style)` pair is coloured.
        right: Headings of columns that hold numbers.
    """
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    numbers = set(right)
    for column in columns:
        made.add_column(column, overflow="fold", justify="right" if column in numbers else "left")
    for row in rows:
        made.add_row(*map(_cell, row))
    if title:
        print_plain(out, title, "bold")
    out.print(made)
    out.print()


def print_decision(out: Console, decision: Decision) -> None:
    """Prints both directions of a decision."""
    print_choice(out, decision.forward)
    if decision.differentiated is not None:
        print_plain(out, "Where the call is differentiated, another implementation runs its forward pass:")
        print_choice(out, decision.differentiated)
    print_choice(out, decision.backward)


def print_choice(out: Console, choice: Choice) -> None:
    """Prints the verdicts of one direction, and where its configuration came from."""
    rows = [
        (v.implementation.name, v.implementation.platform, v.implementation.priority, (v.status, COLORS[v.status]),
         "; ".join(v.reasons) or v.remark)
        for v in choice.verdicts
    ]  # fmt: skip
    title = f"{choice.op}, {choice.direction}, on {choice.device}"
    print_table(
        out, title, "implementation", "platform", "priority", "verdict", "remarks", rows=rows, right=["priority"]
    )
    if choice.platform not in ("auto", *(v.implementation.platform for v in choice.verdicts)):
        print_plain(out, f"No installed backend has an implementation for platform {choice.platform!r}.")
    for plugin in choice.failed_plugins:
        print_plain(out, f"Plugin {plugin.name} ({plugin.distribution}) did not load: {plugin.error}", "red")
    if choice.implementation is None:
        print_plain(out, f"Nobody serves the {choice.direction} pass.\n", "red")
        return
    print_plain(out, f"Configuration from {choice.tier}: {given_values(choice.config)}")
    for step in choice.trail:
        print_plain(out, f"  {step}", "dim")
    out.print()


def print_plain(out: Console, text: str, style: str = "") -> None:
    """Prints text that may hold square brackets, which rich would read as markup."""
    out.print(escape(text), style=style or None)


def milliseconds(seconds: float) -> str:
    """Seconds as milliseconds, with three significant digits or the whole ones."""
    value = seconds * 1e3
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def megabytes(size: int | None) -> str:
    """Bytes as megabytes."""
    return "unknown" if size is None else f"{size / 1e6:.1f}"


def _cell(value: Any) -> str:
    text, style = value if isinstance(value, tuple) else (value, None)
    shown = escape(str(text))
    return f"[{style}]{shown}[/]" if style else shown
