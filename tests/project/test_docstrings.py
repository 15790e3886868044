"""The parser of the site reads every docstring without a warning, which `nox -s docs` counts as an error."""

import logging
from pathlib import Path

import griffe
import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "packages/ejkernel-core/src"
EXTENSION = ROOT / ".ci/griffe_operations.py"
PLAIN = '''"""A module."""


def scale(x: float, factor: float) -> float:
    """Returns a multiple.

    Args:
        x: A number.
        factor: Another number.

    Returns:
        The product.
    """
    return x * factor
'''


class Recorder(logging.Handler):
    """Keeps the text of what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def parse_docstrings(folder: Path, package: str) -> tuple[int, list[str]]:
    """Parses the docstrings of a package from source, and returns their number and the parser's warnings."""
    recorder, logger = Recorder(), logging.getLogger("griffe")
    logger.addHandler(recorder)
    try:
        extensions = griffe.load_extensions(str(EXTENSION))
        loader = griffe.GriffeLoader(
            search_paths=[folder], extensions=extensions, docstring_parser="google", allow_inspection=False
        )
        count = _parse_members(loader.load(package))
    finally:
        logger.removeHandler(recorder)
    return count, recorder.messages


def _parse_members(parent: griffe.Object) -> int:
    """Parses the docstrings of everything that is defined in a module or class, and returns their number."""
    count = 0
    for member in parent.members.values():
        if isinstance(member, griffe.Object):
            if member.docstring is not None:
                _ = member.docstring.parsed  # what is wrong is logged
                count += 1
            count += _parse_members(member)
    return count


def test_the_site_reads_every_docstring_without_a_warning():
    count, warnings = parse_docstrings(SOURCES, "ejkernel")
    assert warnings == []
    assert count > 2500


@pytest.mark.parametrize(
    ("old", "new", "warning"),
    [
        ("factor: Another", "facter: Another", "Parameter 'facter' does not appear in the function signature"),
        ("x: A number.", "x: A number.\n        A stray line", "Failed to get 'name: description' pair"),
        ("x: float, factor: float) -> float", "x, factor: float) -> float", "No type or annotation for parameter 'x'"),
    ],
)
def test_a_docstring_that_the_site_misreads_is_found(tmp_path, old, new, warning):
    (tmp_path / "planted.py").write_text(PLAIN)
    assert parse_docstrings(tmp_path, "planted") == (1, [])
    assert old in PLAIN
    (tmp_path / "planted.py").write_text(PLAIN.replace(old, new))
    assert warning in "\n".join(parse_docstrings(tmp_path, "planted")[1])
