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
WORD_LIST = ROOT / "docs" / "words.toml"


class ForbiddenWord(NamedTuple):
    """A word where it should not be.

    Attributes:
        path: File, from the repository's root.
        line: Line, from 1.
        text: The identifier, or the phrase.
        replacement: What to write.
    """

    path: str
    line: int
    text: str
    replacement: str


def load_word_list() -> dict[str, Any]:
    """The word list."""
    return tomllib.loads(WORD_LIST.read_text())


def find_in_folders(folders: list[str], word_list: dict[str, Any]) -> Iterator[ForbiddenWord]:
    """Every word of the list in the Python files of some folders, exceptions left out."""
    for folder in folders:
        for file in sorted((ROOT / folder).rglob("*.py")):
            path = file.relative_to(ROOT).as_posix()
            yield from find_in_source(path, file.read_text(), word_list)


def find_in_pages(word_list: dict[str, Any]) -> Iterator[ForbiddenWord]:
    """Every phrase of the list in the Markdown pages, those of the folders under `skipped_pages` left out."""
    for pattern in word_list["pages"]:
        for file in sorted(ROOT.glob(pattern)):
            path = file.relative_to(ROOT).as_posix()
            if not path.startswith(tuple(word_list["skipped_pages"])):
                yield from find_in_prose(path, 1, strip_code(file.read_text()), word_list)


def strip_code(page: str) -> str:
    """A page with empty lines for its code blocks, and without code within lines."""
    fences = re.compile(r"^ *(```|~~~).*?^ *\1[^\n]*$", re.MULTILINE | re.DOTALL)
    page = fences.sub(lambda block: "\n" * block.group().count("\n"), page)
    return re.sub(r"`[^`\n]*`", "", page)


def find_in_source(path: str, source: str, word_list: dict[str, Any]) -> Iterator[ForbiddenWord]:
    """Every word of the list in one file."""
    kept = allowed_words(path, word_list)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        line = token.start[0]
        if token.type == tokenize.NAME and token.string not in kept:
            yield from _in_identifier(path, line, token.string, word_list["identifiers"])
        if token.type == tokenize.COMMENT:
            yield from find_in_prose(path, line, token.string.lstrip("# "), word_list)
    for line, text in docstrings(source):
        yield from find_in_prose(path, line, text, word_list)


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of every string that stands alone: docstrings, and what describes a constant."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def _in_identifier(path: str, line: int, name: str, word_list: dict[str, str]) -> Iterator[ForbiddenWord]:
    for part in name.lower().split("_"):
        if part in word_list:
            yield ForbiddenWord(path, line, name, word_list[part])


def find_in_prose(path: str, line: int, text: str, word_list: dict[str, Any]) -> Iterator[ForbiddenWord]:
    """Yields every phrase of the list in a text that begins at a line; pages and `plain_folders` have more of them."""
    kept = allowed_words(path, word_list)
    plain = path.endswith(".md") or path.startswith(tuple(word_list["plain_folders"]))
    for pattern, replacement in (word_list["prose"] | word_list["plain"] if plain else word_list["prose"]).items():
        for match in re.finditer(pattern, text, re.IGNORECASE):
            if match.group().lower() not in kept:
                yield ForbiddenWord(path, line + text.count("\n", 0, match.start()), match.group(), replacement)


def allowed_words(path: str, word_list: dict[str, Any]) -> set[str]:
    """What the exceptions allow in a file: those of its name, and of a folder that it is in."""
    named = (key.split(": ") for key in word_list["exceptions"])
    return {name for place, name in named if path.endswith(place) or (place.endswith("/") and place in path)}


def main(folders: list[str]) -> int:
    """Prints what was found; 1 if there is something."""
    word_list = load_word_list()
    found = list(find_in_folders(folders or word_list["folders"], word_list))
    found += [] if folders else list(find_in_pages(word_list))
    for path, line, text, replacement in found:
        print(f"{path}:{line}: {text!r}: {replacement}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
