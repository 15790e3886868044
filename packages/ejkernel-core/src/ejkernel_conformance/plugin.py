"""The pytest plugin: options, and one test for each selected implementation and case."""

from typing import Any

import pytest

PARAMETERS = (
    "ejk_subject",
    "ejk_differentiable",
    "ejk_kernel_indexed",
    "ejk_kernel_on_gpu",
    "ejk_padded",
    "ejk_padded_differentiable",
    "ejk_implementation",
    "ejk_claim",
    "ejk_gradient",
    "ejk_candidates",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options that select what is tested."""
    group = parser.getgroup("ejkernel", "ejkernel conformance")
    group.addoption("--ejk-impl", action="append", default=[], metavar="NAME", help="implementations to test (all)")
    group.addoption("--ejk-op", action="append", default=[], metavar="NAME", help="operations to test (all)")
    group.addoption("--ejk-tag", default="ci", metavar="TAG", help="which cases to run: ci, awkward, bench (ci)")


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Refuses a selection of something that is not there: nothing would be tested."""
    chosen = session.config.getoption("--ejk-op") or session.config.getoption("--ejk-impl")
    if chosen and (unknown := _selection(session.config).unknown()):
        raise pytest.UsageError(unknown)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Fills in whichever of `PARAMETERS` a test asks for."""
    names = [name for name in PARAMETERS if name in metafunc.fixturenames]
    if not names:
        return
    selection = _selection(metafunc.config)
    for name in names:
        found = selection.of(name)
        # The scope puts the tests of a case next to each other, where they share what was compiled.
        metafunc.parametrize(name, found, ids=[str(item) for item in found], scope="session")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out tests that nothing selected is subject to; pytest would report them as skipped without a refusal."""
    empty = [item for item in items if _is_empty(item)]
    if empty:
        config.hook.pytest_deselected(items=empty)
        items[:] = [item for item in items if item not in empty]


def _selection(config: pytest.Config) -> Any:
    # Imported when first needed: this plugin is loaded by every pytest run of an environment that has ejkernel in it.
    from ejkernel_conformance.selection import Selection

    option: Any = config.getoption
    return Selection(tuple(option("--ejk-op")), tuple(option("--ejk-impl")), option("--ejk-tag"))


def _is_empty(item: Any) -> bool:
    ours = any(name in PARAMETERS for name in getattr(item, "fixturenames", ()))
    return ours and any("empty parameter set" in mark.kwargs.get("reason", "") for mark in item.iter_markers("skip"))
