"""What the pages name is there: files and folders, the options of scripts, modules and what is in them."""

import functools
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = (".ci", ".github", "benchmarks", "changes", "docs", "examples", "packages", "tests")
PAGES = ("README.md", "CONTRIBUTING.md", "benchmarks/README.md", "docs/**/*.md", "packages/*/README.md")
NAMED_BUT_ABSENT = {
    "modules/operations/cosine_attention.py",  # an example tells the reader to write it
    "ejkernel_cuda.compiled_kernels",  # a build puts it there
    "ejkernel.commands",  # groups of entry points
    "ejkernel.targets",
}
CODE = re.compile(r"`([^`\n]+)`")
PATH = re.compile(r"(?:\./)?[\w.-]+(?:/[\w.-]+)*/?")
FILE = re.compile(r"\.(?:py|md|toml|yml|svg|cu)$")
SCRIPT = re.compile(r"((?:benchmarks|examples|tests)/[\w/]+\.py)((?:[ \n\\]+[^\s`|#]+)*)")
MODULE = re.compile(r"ejkernel(?:_\w+)?(?:\.\w+)+")


@functools.cache
def pages() -> dict[str, str]:
    """Every page by its path."""
    found = [path for pattern in PAGES for path in sorted(ROOT.glob(pattern))]
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in found}


def names_in_code_font(page: str) -> Iterator[str]:
    """What stands in code font within the lines of a page."""
    yield from CODE.findall(re.sub(r"^ *```.*?^ *```", "", page, flags=re.MULTILINE | re.DOTALL))


@functools.cache
def path_suffixes() -> set[str]:
    """Every file and folder of the repository, by each of its last parts: `b/c.py` for `a/b/c.py` too."""
    paths = [Path(name) for name in (*FOLDERS, *(path.name for path in ROOT.iterdir() if path.is_file()))]
    paths += [path.relative_to(ROOT) for name in FOLDERS for path in (ROOT / name).rglob("*")]
    return {"/".join(path.parts[n:]) for path in paths for n in range(len(path.parts))}


def first_missing_part(name: str) -> str | None:
    """What is not there of `ejkernel.ops.explain`, which may be a module or a name in one; None if all is."""
    parts = name.split(".")
    (folder,) = (path for path in ROOT.glob(f"packages/*/src/{parts[0]}"))
    for n, part in enumerate(parts[1:], 1):
        if (folder / part).is_dir():
            folder /= part
            continue
        module = folder / f"{part}.py"
        if not module.is_file():
            package = "".join(path.read_text() for path in folder.glob("__init__.py*"))
            return None if re.search(rf"\b{part}\b", package) else part
        return next((x for x in parts[n + 1 : n + 2] if not re.search(rf"\b{x}\b", module.read_text())), None)
    return None


def test_files_and_folders_that_pages_name_exist():
    for page, text in pages().items():
        for name in names_in_code_font(text):
            if PATH.fullmatch(name) and ("/" in name or FILE.search(name)) and name not in NAMED_BUT_ABSENT:
                assert name.removeprefix("./").rstrip("/") in path_suffixes(), (
                    f"{page}: `{name}` is not in the repository"
                )


def test_scripts_that_pages_run_exist_and_have_the_options():
    helpers = "".join(path.read_text() for path in (ROOT / "benchmarks/shared").glob("*.py"))
    for page, text in pages().items():
        for script, rest in SCRIPT.findall(text):
            assert (ROOT / script).is_file(), f"{page}: {script} is not in the repository"
            source = (ROOT / script).read_text() + helpers
            for option in re.findall(r"(?<!\S)--\w[\w-]*", rest):
                assert option in source, f"{page}: {script} has no option {option}"


def test_modules_that_pages_name_exist():
    for page, text in pages().items():
        for code in names_in_code_font(text):
            for name in MODULE.findall(code):
                assert name in NAMED_BUT_ABSENT or not first_missing_part(name), (
                    f"{page}: `{name}` has no {first_missing_part(name)}"
                )


def test_the_table_of_benchmarks_has_every_script():
    listed = set(re.findall(r"^\| `(\w+/\w+\.py)` \|", pages()["benchmarks/README.md"], re.MULTILINE))
    scripts = (ROOT / "benchmarks").glob("*/[!_]*.py")
    assert listed == {f"{path.parent.name}/{path.name}" for path in scripts if path.parent.name != "shared"}
