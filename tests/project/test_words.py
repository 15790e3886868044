"""The words of the glossary stay in names, comments and on the pages that go through kernels line by line."""

import re
from pathlib import Path

import check_words
import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "packages"
PAGES = {
    "kernel_triton_flash.md": (
        "ejkernel-triton/src/ejkernel_triton/tiled_attention",
        "ejkernel-triton/src/ejkernel_triton",
    ),
    "kernel_hopper_flash.md": (
        "ejkernel-pallas/src/ejkernel_pallas/gpu/tiled_attention",
        "ejkernel-pallas/src/ejkernel_pallas/gpu/hopper",
    ),
    "kernel_tpu_paged.md": ("ejkernel-pallas/src/ejkernel_pallas/tpu/paged_attention",),
}


def sources(folders):
    """The text of all modules directly in, or for Hopper below, the folders of a page."""
    files = {file for folder in folders for file in (SOURCES / folder).rglob("*.py")}
    return "\n".join(file.read_text() for file in sorted(files))


@pytest.mark.parametrize("page", PAGES)
def test_names_on_the_pages_of_kernels_are_names_in_the_code(page):
    text = re.sub(r"```.*?```", "", (ROOT / "docs" / page).read_text(), flags=re.DOTALL)
    spans = [span for span in re.findall(r"`([^`]+)`", text) if "/" not in span and not span.endswith(".py")]
    names = {name for span in spans for name in re.findall(r"[A-Za-z_]\w+", span)}
    assert len(names) > 20
    code = sources(PAGES[page])
    missing = sorted(name for name in names if not re.search(rf"\b{name}\b", code))
    assert not missing


def test_no_word_that_the_glossary_replaces_is_left_where_it_is_checked():
    words = check_words.load_word_list()
    assert not list(check_words.find_in_folders(words["folders"], words))
    assert not list(check_words.find_in_pages(words))


def test_the_check_finds_identifiers_comments_and_docstrings():
    source = '"""Of one tile."""\npeak = 1  # the visits of a block\n'
    found = [x.text for x in check_words.find_in_source("a.py", source, check_words.load_word_list())]
    assert found == ["peak", "visits", "Of one tile."]


def test_the_check_reads_pages_but_not_their_code():
    page = "A block visits tiles.\n\n```python\npeak = 1  # nobody\n```\n\n`visits` of nobody.\n"
    found = check_words.find_in_prose("a.md", 1, check_words.strip_code(page), check_words.load_word_list())
    assert [(x.line, x.text) for x in found] == [(1, "visits"), (7, "nobody")]


def test_exceptions_are_still_needed():
    words = check_words.load_word_list()
    bare = {**words, "exceptions": {}}
    found = [*check_words.find_in_folders(words["folders"], bare), *check_words.find_in_pages(bare)]
    left = [x._replace(text=x.text.lower()) for x in found]
    for exception in words["exceptions"]:
        needed = [x for x in left if x.text in check_words.allowed_words(x.path, {"exceptions": [exception]})]
        assert needed, exception
