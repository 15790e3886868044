"""The pytest plugin: options, and one test for each selected implementation and case that can run here."""

import itertools
from pathlib import Path
from typing import Any

import pytest

PARAMETERS = (
    "ejk_subject",
    "ejk_differentiable",
    "ejk_forward_mode",
    "ejk_row_states",
    "ejk_kernel_indexed",
    "ejk_kernel_on_gpu",
    "ejk_padded",
    "ejk_padded_differentiable",
    "ejk_requests",
    "ejk_requests_differentiable",
    "ejk_implementation",
    "ejk_claim",
    "ejk_gradient",
    "ejk_invariance",
    "ejk_candidates",
)
COVER = ("all", "first", "second", "stronger", "rest")
OF_OUTPUTS = ("test_value", "test_determinism", "test_eager_equals_jit")
OF_GRADIENTS = ("test_gradients", "test_gradient_determinism")
"""The transforms that run a program of a case's output, and one of its gradients, on the inputs of the case."""
_tests = pytest.StashKey[list[tuple[Any, Any]]]()
ELSEWHERE = "ejkernel_elsewhere"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options that select what is tested."""
    group = parser.getgroup("ejkernel", "ejkernel conformance")
    group.addoption("--ejk-impl", action="append", default=[], metavar="NAME", help="implementations to test (all)")
    group.addoption("--ejk-op", action="append", default=[], metavar="NAME", help="operations to test (all)")
    group.addoption(
        "--ejk-tag", default="ci", metavar="TAG", help="which cases to run: ci, awkward, bench, bench_cpu (ci)"
    )
    group.addoption("--ejk-transform", action="append", default=[], metavar="TEST", help="test functions to run (all)")
    group.addoption(
        "--ejk-cover",
        default="all",
        choices=COVER,
        help="first: a covering design, the few tests in which all that matters appears; stronger: a larger one, with"
        " all of the first; second: what it adds to the first; rest: all but the first (all)",
    )
    group.addoption(
        "--ejk-refused",
        default="leave-out",
        choices=("leave-out", "fail"),
        help="what to do with a test that dispatch refuses to serve: leave it out, or let it fail (leave-out)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Registers the mark of tests that belong to a covering design whatever they cover."""
    config.addinivalue_line("markers", "ejk_first: a test of the suite that both designs of `--ejk-cover` have")


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Refuses a selection of something that is not there: nothing would be tested."""
    chosen = session.config.getoption("--ejk-op") or session.config.getoption("--ejk-impl")
    if chosen and (unknown := _selection(session.config).unknown()):
        raise pytest.UsageError(unknown)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Fills in whichever of `PARAMETERS` a test asks for, where the test can run on it."""
    names = [name for name in PARAMETERS if name in metafunc.fixturenames]
    if not names:
        return
    from ejkernel_conformance.served import refusal_of

    selection, refusal = _selection(metafunc.config), refusal_of(metafunc.function)
    keeps_refused = metafunc.config.getoption("--ejk-refused") == "fail"
    transforms = metafunc.config.getoption("--ejk-transform")
    runs = not transforms or metafunc.function.__name__ in transforms
    for name in names:
        every = selection.of(name) if runs else []
        metafunc.config.stash.setdefault(_tests, []).extend((metafunc.function, item) for item in every)
        found = [item for item in every if keeps_refused or not refusal(item)]
        # The scope puts the tests of a case next to each other, where they share what was compiled.
        metafunc.parametrize(name, found, ids=[str(item) for item in found], scope="session")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out tests that nothing selected is subject to, and those that `--ejk-cover` leaves to another run."""
    left_out = {item for item in items if _is_empty(item)}
    cover = config.getoption("--ejk-cover")
    ours = [(item, parameter) for item in items if (parameter := parameter_of(item)) is not None]
    if cover != "all" and ours:
        from ejkernel_conformance import design

        marked = {index for index, (item, _) in enumerate(ours) if item.get_closest_marker("ejk_first")}
        chosen = design.select(str(cover), [(_transform(item), parameter) for item, parameter in ours], marked)
        left_out |= {item for index, (item, _) in enumerate(ours) if index not in chosen}
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]
    put_tests_of_a_subject_together(items)
    _note_subjects_asked_for_both(items)


def put_tests_of_a_subject_together(items: list[Any]) -> None:
    """Puts the tests of a subject next to each other, in the order of the subjects' first tests.

    pytest does so for the tests of one fixture; those of outputs and of gradients are of several.
    """
    ours = [n for n, item in enumerate(items) if parameter_of(item) is not None]
    groups: dict[tuple[Path, int], list[Any]] = {}
    for n in ours:
        groups.setdefault((items[n].path, id(parameter_of(items[n]))), []).append(items[n])
    for n, item in zip(ours, itertools.chain.from_iterable(groups.values()), strict=True):
        items[n] = item


def _note_subjects_asked_for_both(items: list[pytest.Item]) -> None:
    """Lets subjects whose output and whose gradients are tested have one program for both."""
    asked = [(_transform(item), parameter) for item in items if (parameter := parameter_of(item)) is not None]
    if not asked:
        return
    from ejkernel_conformance.running import asked_for_both, requests_asked_for_both

    outputs = {id(subject) for transform, subject in asked if transform in OF_OUTPUTS}
    asked_for_both.update(s for transform, s in asked if transform in OF_GRADIENTS and id(s) in outputs)
    requests = {id(subject) for transform, subject in asked if transform == "test_requests"}
    requests_asked_for_both.update(s for t, s in asked if t == "test_request_gradients" and id(s) in requests)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """With `--ejk-refused=fail`, fails a test that dispatch refuses to serve."""
    if item.config.getoption("--ejk-refused") != "fail" or (parameter := parameter_of(item)) is None:
        return
    from ejkernel_conformance.served import refusal_of

    function: Any = getattr(item, "function", None)
    if reason := refusal_of(function)(parameter):
        pytest.fail(f"dispatch refuses {parameter}: {reason}", pytrace=False)


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    """Says what would run on devices that are not here, in a line per device."""
    return _elsewhere(config)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hands those lines from a worker of pytest-xdist to the process that reports: only workers collect tests."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None and getattr(session.config, "workerinput", {}).get("workerid") == "gw0":
        output[ELSEWHERE] = _elsewhere(session.config)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Keeps the lines of a worker for the report."""
    lines = getattr(node, "workeroutput", {}).get(ELSEWHERE)
    if lines:
        node.config.stash[_lines] = lines


_lines = pytest.StashKey[list[str]]()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Prints the lines that a worker sent."""
    for line in config.stash.get(_lines, []):
        terminalreporter.write_line(line)


def parameter_of(item: Any) -> Any:
    """Returns the parameter of the suite that an item runs on; None for tests that are not the suite's."""
    values = getattr(getattr(item, "callspec", None), "params", {})
    return next((values[name] for name in PARAMETERS if name in values and not _is_empty(item)), None)


def _elsewhere(config: pytest.Config) -> list[str]:
    tests = config.stash.get(_tests, [])
    if not tests:
        return []
    from ejkernel_conformance.devices import summary

    return summary(tests)


def _transform(item: Any) -> str:
    return getattr(item, "originalname", item.name)


def _selection(config: pytest.Config) -> Any:
    # Imported when first needed: this plugin is loaded by every pytest run of an environment that has ejkernel in it.
    from ejkernel_conformance.selection import Selection

    option: Any = config.getoption
    return Selection(tuple(option("--ejk-op")), tuple(option("--ejk-impl")), option("--ejk-tag"))


def _is_empty(item: Any) -> bool:
    ours = any(name in PARAMETERS for name in getattr(item, "fixturenames", ()))
    return ours and any("empty parameter set" in mark.kwargs.get("reason", "") for mark in item.iter_markers("skip"))
