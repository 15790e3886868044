"""The help texts in `docs/command_line.md` are those of the program."""

import re
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from ejkernel.cli import COMMANDS, main

PAGE = Path(__file__).parents[3] / "docs" / "command_line.md"
HELP = re.compile(r"^```console\n\$ ejkernel ?(?P<command>[a-z ]*) --help\n(?P<text>.*?)\n```$", re.M | re.S)


def commands() -> list[tuple[str, ...]]:
    """Every command of the core, as what is typed."""
    found = []
    for one in COMMANDS:
        command = main.get_command(click.Context(main), one.name)
        found.append((one.name,))
        found += [(one.name, name) for name in command.commands] if isinstance(command, click.Group) else []
    return found


def written() -> dict[tuple[str, ...], str]:
    return {tuple(match["command"].split()): match["text"] for match in HELP.finditer(PAGE.read_text())}


def test_the_page_has_every_command():
    assert sorted(written()) == sorted(commands())


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_help_of_commands_matches_the_page(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    shown = CliRunner().invoke(main, [*command, "--help"], prog_name="ejkernel").output
    assert "\n".join(line.rstrip() for line in shown.rstrip().splitlines()) == written()[command]


def test_the_page_shows_where_a_configuration_comes_from_as_the_program_does():
    command = ["explain", "flash_attention", "--shape", "1,4096,16,128", "--platform", "xla"]
    said = CliRunner().invoke(main, command).output
    tiers = "\n".join(line.rstrip() for line in said.partition("Configuration ")[2].partition("\n\n")[0].splitlines())
    assert tiers.startswith("from heuristics: ")
    assert f"Configuration {tiers}\n" in PAGE.read_text()
