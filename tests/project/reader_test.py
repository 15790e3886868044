"""Draws names, comments and sentences for a reader who has not seen the project, who says what each of them means.

    python tests/project/reader_test.py --seed 1               # prints the sheet
    python tests/project/reader_test.py --seed 1 --sources     # prints where each item is, to judge the answers

The sheet has 60 identifiers (20 of core, 20 of Triton and CUDA, 20 of Pallas), 40 comments or docstrings with ten lines
around them, and 40 sentences of the documentation. The names and the prose of a tree are plain if a reader explains at
least 57, 38 and 39 of them rightly. What was missed is mended, and a new draw goes to another reader.

The identifiers are functions, classes, arguments, the fields of classes, the constants of modules, and tests. The
variables of a function and the arguments of a lambda are not drawn: they are only ever read with their function around
them. An argument is shown with the name of its function, a field with that of its class, and each with its module, as
nobody sees one without the other. Counts of earlier sheets do not compare: until 27 November 2026 they had variables
and no tests, then no functions and classes of arguments and fields.
"""

import argparse
import ast
import io
import keyword
import random
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import check_words

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "core": ("packages/ejkernel-core/src/ejkernel", "packages/ejkernel-xla/src"),
    "Triton and CUDA": ("packages/ejkernel-triton/src", "packages/ejkernel-cuda/src"),
    "Pallas": ("packages/ejkernel-pallas/src",),
}
TESTS = {
    "core": ("tests/core", "tests/xla"),
    "Triton and CUDA": ("tests/triton", "tests/cuda"),
    "Pallas": ("tests/pallas",),
}
NAMES, COMMENTS, SENTENCES, AROUND = 20, 40, 40, 5
SHORTEST = 4
"""Letters of the shortest identifier that is drawn: `q` and `lse` mean nothing outside of their formula."""


class Item(NamedTuple):
    """Something to explain.

    Attributes:
        text: What the reader sees.
        source: File and line.
    """

    text: str
    source: str


def main() -> None:
    """Prints a sheet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True, help="draws the same items for the same tree")
    parser.add_argument("--sources", action="store_true", help="print where each item is instead of the item")
    options = parser.parse_args()
    for title, items in draw(random.Random(options.seed)):
        print(f"\n# {title}\n")
        for number, item in enumerate(items, 1):
            print(f"{number}. {item.source if options.sources else item.text}")


def draw(numbers: random.Random) -> Iterator[tuple[str, list[Item]]]:
    """Yields the title and the items of each section."""
    files = {part: [file for folder in folders for file in sources(folder)] for part, folders in PACKAGES.items()}
    for part, paths in files.items():
        tests = [file for folder in TESTS[part] for file in sources(folder)]
        yield f"Identifiers of {part}: what does each hold or do?", numbers.sample(identifiers(paths, tests), NAMES)
    every = [item for paths in files.values() for path in paths for item in comments(path)]
    yield "Comments and docstrings: what does the marked one say?", numbers.sample(every, COMMENTS)
    yield "Sentences of the documentation: what does each say?", numbers.sample(list(sentences()), SENTENCES)


def sources(folder: str) -> list[Path]:
    """Returns the Python files of a folder, in the same order everywhere."""
    return sorted((ROOT / folder).rglob("*.py"))


def identifiers(paths: list[Path], tests: list[Path]) -> list[Item]:
    """Returns the names that the files of packages define, and the names of the tests in other files."""
    items: dict[str, Item] = {}
    for path in paths + tests:
        for name, kind, line in definitions(ast.parse(path.read_text())):
            is_drawn = path in paths or (kind.startswith("function") and name.startswith("test_"))
            if is_drawn and len(name.strip("_")) >= SHORTEST and not keyword.iskeyword(name):
                items.setdefault(name, Item(f"`{name}` ({kind} in {module(path)})", where(path, line)))
    return [items[name] for name in sorted(items)]


def module(path: Path) -> str:
    """Returns the path of a file below `tests`, or that of the module that it is."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return "/".join(parts[1:] if parts[0] == "tests" else parts[3:])


def definitions(tree: ast.Module) -> Iterator[tuple[str, str, int]]:
    """Yields the name, the kind and the line of each function, class, argument, field and module constant."""
    for statement in statements(tree.body):
        for name in assigned(statement):
            yield name, "module constant", statement.lineno
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name):
                if not name.startswith("__"):
                    yield name, "function", node.lineno
                for argument in arguments(node.args):
                    yield argument.arg, f"argument of `{name}`", argument.lineno
            case ast.ClassDef(name=name):
                yield name, "class", node.lineno
                for statement in node.body:
                    for field in assigned(statement):
                        yield field, f"field of `{name}`", statement.lineno
            case _:
                pass


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yields the statements of a module, those in its branches too."""
    for statement in body:
        yield statement
        if not isinstance(statement, ast.FunctionDef | ast.ClassDef):
            for branch in ("body", "orelse", "handlers", "finalbody"):
                yield from statements(getattr(statement, branch, []))


def assigned(statement: ast.stmt) -> Iterator[str]:
    """Yields the names that a statement assigns, without those of Python's own protocols."""
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    for target in targets:
        for node in ast.walk(target) if isinstance(target, ast.AST) else ():
            if isinstance(node, ast.Name) and not node.id.startswith("__"):
                yield node.id


def arguments(signature: ast.arguments) -> list[ast.arg]:
    """Returns the arguments of a function."""
    star = [argument for argument in (signature.vararg, signature.kwarg) if argument]
    return signature.posonlyargs + signature.args + signature.kwonlyargs + star


def comments(path: Path) -> Iterator[Item]:
    """Yields the comments and the docstrings of a file, each with the lines around it."""
    text = path.read_text()
    lines = text.splitlines()
    starts = {line for line, _ in check_words.docstrings(text)}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and len(token.string.split()) >= SHORTEST:
            starts.add(token.start[0])
    for start in sorted(starts):
        first = max(start - 1 - AROUND, 0)
        shown = (
            f"{'>' if n == start else ' '} {lines[n - 1]}"
            for n in range(first + 1, min(start + AROUND, len(lines)) + 1)
        )
        block = "\n".join(shown)
        yield Item(f"\n```python\n{block}\n```\n", where(path, start))


def sentences() -> Iterator[Item]:
    """Yields the sentences of the pages, the lab notebook left out."""
    for path in sorted((ROOT / "docs").rglob("*.md")):
        if "lab" in path.parts:
            continue
        page = re.sub(r"^ *```.*?^ *```|<!--.*?-->", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
        for paragraph in page.split("\n\n"):
            if re.match(r"\s*(\||#|!|-|:::|\d+\.)", paragraph):
                continue
            for sentence in re.split(r"(?<=[.:?])\s+(?=[A-Z`])", " ".join(paragraph.split())):
                if len(re.sub(r"`[^`]*`", "", sentence).split()) >= SHORTEST:
                    line = path.read_text().count("\n", 0, path.read_text().find(sentence[:20])) + 1
                    yield Item(sentence, where(path, line))


def where(path: Path, line: int) -> str:
    """Returns a file and line, from the repository's root."""
    return f"{path.relative_to(ROOT).as_posix()}:{line}"


if __name__ == "__main__":
    main()
