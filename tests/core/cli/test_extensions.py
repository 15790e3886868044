"""Commands that other distributions add."""

from pathlib import Path

import pytest
from distributions import add_distribution


@pytest.fixture
def adds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Installs a distribution whose module `added` declares the command `extra`."""

    def installed(source: str, name: str = "extra", target: str = "added:command") -> None:
        entry_point = f"[ejkernel.commands]\n{name} = {target}"
        add_distribution(monkeypatch, tmp_path, Path("added.py"), source, entry_point)

    return installed


COMMAND = """
import click

@click.command()
@click.option("--word", default="hello")
def command(word):
    "Say a word."
    click.echo(f"{word} from outside")
"""


def test_a_command_is_listed_and_runs(run, adds):
    adds(COMMAND)
    assert "A command of added; see" in run("--help").output
    assert "Say a word." in run("extra", "--help").output
    assert run("extra", "--word", "hi").output == "hi from outside\n"


def test_a_command_that_does_not_load_says_why_and_leaves_the_others(run, adds):
    adds("import no_such_toolchain")
    assert "No module named 'no_such_toolchain'" in run("extra", "--anything", "at all", status=1).output
    listed = run("--help").output
    assert "explain" in listed
    assert "A command of added" in listed
    assert "the command 'extra' of added does not load" in run("extra", "--help").output


def test_an_entry_point_that_is_no_command_is_refused(run, adds):
    adds("command = 3")
    assert "its entry point is of type int, not a click.Command" in run("extra", status=1).output


def test_commands_of_the_core_are_not_replaced(run, adds):
    adds(COMMAND, name="ops")
    assert "from outside" not in run("ops").output


def test_commands_are_not_imported_before_they_are_asked_for(run, adds):
    adds("raise SystemExit('imported')")
    assert "flash_attention" in run("ops").output
