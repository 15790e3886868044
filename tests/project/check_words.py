"""Keeps words that the glossary replaces out of identifiers, comments, docstrings and pages.

python tests/project/check_words.py            # the folders and pages in docs/words.toml
python tests/project/check_words.py FOLDER ... # Python files of others, to see what is left there
"""

import ast
import io
import re
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
LIST = ROOT / "docs" / "words.toml"


class Found(NamedTuple):
    """A word where it should not be.

    Attributes:
        path: File, from the repository's root.
        line: Line, from 1.
        text: The identifier, or the phrase.
        instead: What to write.
    """

    path: str
    line: int
    text: str
    instead: str


def load() -> dict[str, Any]:
    """The word list."""
    return tomllib.loads(LIST.read_text())


def check(folders: list[str], words: dict[str, Any]) -> Iterator[Found]:
    """Every word of the list in the Python files of some folders, exceptions left out."""
    for folder in folders:
        for file in sorted((ROOT / folder).rglob("*.py")):
            path = file.relative_to(ROOT).as_posix()
            yield from in_source(path, file.read_text(), words)


def check_pages(words: dict[str, Any]) -> Iterator[Found]:
    """Every phrase of the list in the Markdown pages, those of the folders under `skipped_pages` left out."""
    for pattern in words["pages"]:
        for file in sorted(ROOT.glob(pattern)):
            path = file.relative_to(ROOT).as_posix()
            if not path.startswith(tuple(words["skipped_pages"])):
                yield from in_prose(path, 1, without_code(file.read_text()), words)


def without_code(page: str) -> str:
    """A page with empty lines for its code blocks, and without code within lines."""
    fences = re.compile(r"^ *(```|~~~).*?^ *\1[^\n]*$", re.MULTILINE | re.DOTALL)
    page = fences.sub(lambda block: "\n" * block.group().count("\n"), page)
    return re.sub(r"`[^`\n]*`", "", page)


def in_source(path: str, source: str, words: dict[str, Any]) -> Iterator[Found]:
    """Every word of the list in one file."""
    kept = kept_words(path, words)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        line = token.start[0]
        if token.type == tokenize.NAME and token.string not in kept:
            yield from _in_identifier(path, line, token.string, words["identifiers"])
        if token.type == tokenize.COMMENT:
            yield from in_prose(path, line, token.string.lstrip("# "), words)
    for line, text in docstrings(source):
        yield from in_prose(path, line, text, words)


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of every string that stands alone: docstrings, and what describes a constant."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def _in_identifier(path: str, line: int, name: str, words: dict[str, str]) -> Iterator[Found]:
    for part in name.lower().split("_"):
        if part in words:
            yield Found(path, line, name, words[part])


def in_prose(path: str, line: int, text: str, words: dict[str, Any]) -> Iterator[Found]:
    """Yields every phrase of the list in a text that begins at a line; pages and `plain_folders` have more of them."""
    kept = kept_words(path, words)
    plain = path.endswith(".md") or path.startswith(tuple(words["plain_folders"]))
    for pattern, instead in (words["prose"] | words["plain"] if plain else words["prose"]).items():
        for match in re.finditer(pattern, text, re.IGNORECASE):
            if match.group().lower() not in kept:
                yield Found(path, line + text.count("\n", 0, match.start()), match.group(), instead)


def kept_words(path: str, words: dict[str, Any]) -> set[str]:
    """What the exceptions allow in a file: those of its name, and of a folder that it is in."""
    named = (key.split(": ") for key in words["exceptions"])
    return {name for place, name in named if path.endswith(place) or (place.endswith("/") and place in path)}


def main(folders: list[str]) -> int:
    """Prints what was found; 1 if there is something."""
    words = load()
    found = list(check(folders or words["folders"], words))
    found += [] if folders else list(check_pages(words))
    for path, line, text, instead in found:
        print(f"{path}:{line}: {text!r}: {instead}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
