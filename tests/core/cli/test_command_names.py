"""Names of commands and operations: quick help, and suggestions for what is misspelt."""

import json
import subprocess
import sys

import click
import pytest

from ejkernel.cli import COMMANDS, groups, main
from ejkernel.suggestion import did_you_mean, no_such_name_message, similar

PROBE = """
import json, sys
from ejkernel.cli import main
try:
    main(sys.argv[1:])
finally:
    print(json.dumps(sorted(sys.modules)), file=sys.stderr)
"""


@pytest.mark.parametrize("arguments", [("--help",), ("--version",), ("docter",)], ids=" ".join)
def test_help_imports_neither_jax_nor_a_command(arguments):
    done = subprocess.run([sys.executable, "-c", PROBE, *arguments], capture_output=True, text=True, timeout=600)
    modules = json.loads(done.stderr.splitlines()[-1])
    assert {name.partition(".")[0] for name in modules} & {"jax", "jaxlib", "numpy", "rich", "ejkernel_pallas"} == set()
    assert "ejkernel.ops" not in modules


@pytest.mark.parametrize("command", COMMANDS, ids=lambda one: one.name)
def test_the_summary_is_the_first_line_of_the_commands_own_help(command):
    loaded = main.get_command(click.Context(main), command.name)
    assert loaded.get_short_help_str(limit=1000) == command.summary


def test_the_listed_summary_of_profile_matches_its_help():
    profile = main.get_command(click.Context(main), "profile")
    assert profile.get_short_help_str(limit=1000) == groups.PACKAGE_COMMANDS["profile"].summary


def test_a_command_of_a_package_that_is_missing_names_the_package(run, monkeypatch):
    monkeypatch.setattr(groups, "_entry_points", dict)
    assert "pip install 'ejkernel-pallas[aot]'" in run("profile", "flash_attention", status=2).output
    assert "profile" not in run("--help").output
    assert "did you mean 'profile'?" in run("profil", status=2).output


def test_a_misspelt_command_is_suggested(run):
    assert "there is no command 'docter'; did you mean 'doctor'?" in run("docter", status=2).output


@pytest.mark.parametrize("command", ["explain", "bench", "tune"])
def test_a_misspelt_operation_is_suggested(run, command):
    output = run(command, "flash_atention", "--shape", "1,8,1,8", status=2).output
    assert "no operation 'flash_atention'; did you mean 'flash_attention'?" in output


def test_other_misspelt_names_are_suggested(run):
    small = ("explain", "flash_attention", "--shape", "1,8,1,8")
    assert "did you mean 'causal'?" in run(*small, "-o", "casual=true", status=2).output
    assert "did you mean 'query'?" in run(*small, "--shape", "quer=1,8,1,8", status=2).output


@pytest.mark.parametrize(
    ("name", "known", "found"),
    [
        ("flash", ["flash_attention", "flash_mla", "gru"], ["flash_mla", "flash_attention"]),
        ("Flash-Attention", ["flash_attention", "page_attention"], ["flash_attention"]),
        ("zzz", ["flash_attention"], []),
        ("gr", [], []),
    ],
)
def test_similar_names_are_found_for_suggestions(name, known, found):
    assert similar(name, known) == found
    assert bool(did_you_mean(name, known)) == bool(found)


def test_all_names_are_listed_if_none_is_similar():
    assert no_such_name_message("operation", "zzz", ["b", "a"]) == "no operation 'zzz'; there are a, b"
