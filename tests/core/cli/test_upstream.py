"""The list behind the page "Coming from upstream": what it says is here is here, and what it says is gone is gone."""

import importlib
import subprocess
import sys

import pytest

import ejkernel.modules
from ejkernel.compat.upstream import names, upstream_page

LISTED = names()


@pytest.mark.parametrize("module", LISTED["same"])
def test_names_that_stay_can_be_imported(module):
    wanted = ", ".join(name for name in LISTED["same"][module])
    exec(f"from {module} import {wanted}", {})


def test_names_that_stay_can_be_imported_first():
    script = "; ".join(f"from {module} import {', '.join(found)}" for module, found in LISTED["same"].items())
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("name", LISTED["instead"])
def test_names_that_are_gone_are_not_here(name):
    module, _, attribute = name.rpartition(".")
    assert not hasattr(importlib.import_module(module), attribute)
    assert LISTED["instead"][name]


def test_what_is_named_instead_exists():
    text = " ".join(LISTED["instead"].values())
    for name in ("flash_mla", "mla_decode", "recurrent_attention"):
        assert f"`{name}`" in text
        assert name in ejkernel.modules.__all__


def test_the_page_has_every_line():
    page = upstream_page()
    for module, found in LISTED["same"].items():
        row = next(line for line in page.splitlines() if line.startswith(f"| `{module}` |"))
        assert all(f"`{name}`" in row for name in found)
    for name, use in LISTED["instead"].items():
        assert f"| `{name}` | {use} |" in page
    for entry in LISTED["difference"]:
        assert set(entry) == {"topic", "upstream", "here"}
        assert f"| {entry['topic']} | {entry['upstream']} | {entry['here']} |" in page
