"""What surrounds the packages stays true: workflows name sessions that exist, figures are those the scripts draw."""

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

from readme_table import CHOSEN_MARK, ONLY_PINNED_MARK, PATTERN_BY_COLUMN, marks_by_operation

ROOT = Path(__file__).parents[2]
MAX_WORDS_OF_CHANGE = 20
FRAGMENT_NAME = re.compile(r"(\d+|\+[\w-]+)\.(breaking|feature|performance|bugfix|misc)(\.[1-9]\d*)?\.md")
"""Towncrier ignores what is not a number after the type, so two such names would be one."""
HOW_TO_RENEW = (
    "the README's table of operations is out of date (`python tests/project/readme_table.py --write` renews it)"
)


def sessions() -> set[str]:
    """The sessions of the noxfile, as far as they are plain functions."""
    return set(re.findall(r"^@nox\.session.*\ndef (\w+)", (ROOT / "noxfile.py").read_text(), re.MULTILINE))


def test_workflows_run_sessions_that_exist():
    called = {
        name
        for workflow in (ROOT / ".github" / "workflows").glob("*.yml")
        for names in re.findall(r"nox -s ([\w ]+)$", workflow.read_text(), re.MULTILINE)
        for name in names.split()
    }
    assert called >= {"lint", "types", "tests", "wheels"}
    assert called <= sessions()


def test_every_figure_is_drawn_by_a_script_and_shown_on_a_page(tmp_path: Path):
    subprocess.run([sys.executable, "make.py", str(tmp_path)], cwd=ROOT / "docs" / "figures", check=True, timeout=600)
    drawn, committed = (
        {path.name for path in folder.glob("*.svg")} for folder in (tmp_path, ROOT / "docs" / "figures")
    )
    assert drawn == committed
    pages = "".join(page.read_text() for page in [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"])
    for name in drawn:
        assert ElementTree.parse(tmp_path / name).getroot().tag.endswith("svg")
        # The site shows the dark variant of a figure wherever a page shows the figure.
        assert f"figures/{name.replace('_dark.svg', '.svg')}" in pages


def test_the_readme_claims_no_kernel_that_is_not_there():
    marks = marks_by_operation()
    rows = [
        line
        for line in (ROOT / "README.md").read_text().splitlines()
        if re.search(f"[{CHOSEN_MARK}{ONLY_PINNED_MARK}] ", line)
    ]
    listed = {name: row.split("|")[2:-1] for row in rows for name in re.findall(r"`(\w+)`", row) if name in marks}
    assert listed.keys() == marks.keys(), f"{HOW_TO_RENEW}: it lacks {sorted(marks.keys() - listed.keys())}"
    # A column without a mark anywhere is that of a backend that is not installed: nothing is known of its cells.
    installed = {column for row in marks.values() for column, mark in zip(PATTERN_BY_COLUMN, row, strict=True) if mark}
    for name, cells in listed.items():
        claimed, there = (
            dict(zip(PATTERN_BY_COLUMN, row, strict=True)) for row in (map(str.strip, cells), marks[name])
        )
        wrong = {column: (claimed[column], there[column]) for column in installed if claimed[column] != there[column]}
        assert not wrong, f"{HOW_TO_RENEW}: for {name} it has, beside what is registered: {wrong}"


def test_change_fragments_are_one_line_and_imperative():
    for fragment in (ROOT / "changes").glob("*/*.md"):
        assert FRAGMENT_NAME.fullmatch(fragment.name), f"{fragment.name}: wants a name as changes/README.md says"
        text = fragment.read_text()
        assert re.fullmatch(r"[A-Z].*\n", text), f"{fragment.name}: wants one line"
        assert len(text.split()) <= MAX_WORDS_OF_CHANGE, f"{fragment.name}: wants at most {MAX_WORDS_OF_CHANGE} words"
        assert not re.match(r"(?!Speed|Embed|Feed)\w+ed ", text), f"{fragment.name}: wants an imperative"


def test_the_readme_maps_every_room():
    """Each folder of the repository, of the packages and of core is named in the map, in one line of a table."""
    section = (ROOT / "README.md").read_text().split("\n### Map of the sources\n")[1].split("\n## ")[0]
    named = set(re.findall(r"`([\w./-]+)/`", section))
    core = ROOT / "packages/ejkernel-core/src/ejkernel"
    rooms = {path.name for path in core.iterdir() if (path / "__init__.py").is_file()}
    rooms |= {path.relative_to(ROOT).as_posix() for path in ROOT.glob("packages/*/src/ejkernel*") if path.is_dir()}
    rooms -= {"packages/ejkernel-cuda/src/ejkernel_cuda"}  # named below its distribution, next to `csrc/`
    tracked = subprocess.run(["git", "ls-tree", "--name-only", "-d", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    rooms |= {name for name in tracked.stdout.split() if not name.startswith(".")} - {"packages"}
    assert rooms - named == set()
