"""The help texts in `docs/command_line.md` are those of the program."""

import re
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from ejkernel.cli import main

PAGE = Path(__file__).parents[2] / "docs" / "command_line.md"
HELP = re.compile(r"^```console\n\$ ejkernel ?(?P<command>[a-z ]*) --help\n(?P<text>.*?)\n```$", re.M | re.S)


def commands(group: click.Group, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Every command, as what is typed."""
    found = []
    for name, command in group.commands.items():
        found.append((*path, name))
        if isinstance(command, click.Group):
            found += commands(command, (*path, name))
    return found


def written() -> dict[tuple[str, ...], str]:
    return {tuple(match["command"].split()): match["text"] for match in HELP.finditer(PAGE.read_text())}


def test_the_page_has_every_command():
    assert sorted(written()) == sorted(commands(main))


@pytest.mark.parametrize("command", commands(main), ids=" ".join)
def test_help_is_as_written(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    shown = CliRunner().invoke(main, [*command, "--help"], prog_name="ejkernel").output
    assert "\n".join(line.rstrip() for line in shown.rstrip().splitlines()) == written()[command]
