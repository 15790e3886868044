"""A command line with a store of its own, and backends that are installed for one test."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from distributions import add_distribution

from ejkernel.cli import main
from ejkernel.cli.ops import support_matrix
from ejkernel.ops import plugins
from ejkernel.ops.call import default_chain
from ejkernel.ops.config.persistent import DIRECTORY_VARIABLE
from ejkernel_conformance.subjects import abstract_record

Run = Callable[..., Result]
Install = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def traced_cases() -> Iterator[Callable[..., Any]]:
    """Gives `ejkernel ops` the records that the conformance suite has traced; returns the function that it replaces.

    Tracing all cases takes ten seconds, and the suite has done it to collect its tests.
    """
    module = sys.modules[support_matrix.__module__]
    with pytest.MonkeyPatch.context() as patch:
        original = module._case_record
        patch.setattr(module, "_case_record", abstract_record)
        yield original


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path / "store"))
    default_chain.cache_clear()
    yield tmp_path / "store" / "configs.json"
    default_chain.cache_clear()


@pytest.fixture
def run(store: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("COLUMNS", "160")

    def invoke(*arguments: str, status: int = 0, answer: str | None = None) -> Result:
        result = CliRunner().invoke(main, arguments, input=answer)
        assert result.exit_code == status, result.output
        return result

    return invoke


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Makes a module a backend that plugin discovery finds, and returns the folder it lies in."""
    site = tmp_path / "site"

    def installed(module: str, source: str) -> Path:
        entry_point = f"[ejkernel]\n{module} = {module}"
        add_distribution(monkeypatch, site, Path(module, "__init__.py"), source, entry_point)
        plugins.reload()
        return site

    yield installed
    plugins.reload()
