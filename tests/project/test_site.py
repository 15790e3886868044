"""The site: search leads to guides first, the navigation has every page, and tables keep names whole."""

import json
import re
import sys
import unicodedata
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / ".ci"))


def pages_with_links() -> list[Path]:
    return [*(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md"), *ROOT.glob("*.md")]


def without_code_blocks(text: str) -> str:
    return re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(text: str) -> set[str]:
    """Returns the anchors of a page's headings, as the Markdown of the site names them."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.*)$", without_code_blocks(text), re.MULTILINE):
        title = re.sub(r"\]\([^)]*\)", "", heading)
        title = unicodedata.normalize("NFKD", title).encode("ascii", "ignore").decode()
        slug = re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower())
        number = next(n for n in range(100) if (f"{slug}_{n}" if n else slug) not in found)
        found.add(f"{slug}_{number}" if number else slug)
    return found


def dead_anchors(page: Path) -> list[str]:
    """Returns the links of a page to headings that do not exist."""
    links = re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", without_code_blocks(page.read_text()))
    targets = [((page.parent / path).resolve() if path else page, anchor) for path, anchor in links if ":" not in path]
    return [f"{page.name}: {x.name}#{y}" for x, y in targets if x.is_file() and y not in anchors(x.read_text())]


def test_the_search_index_leads_to_guides_and_not_to_members(tmp_path):
    from search_index import refine

    items = [
        ("operations/paged_attention/", "Paged attention"),
        ("api/types/", "Types"),
        ("api/types/#ejkernel.types.MaskInfo", "MaskInfo"),
        ("api/types/#ejkernel.types.MaskInfo.bias", "bias"),
        ("api/ejgpu/", "ejgpu"),
        ("api/ejgpu/#ejkernel.compat.ejgpu.flash_attn_varlen", "flash_attn_varlen"),
        ("lab/paged_attention_gpu/", "Paged attention: what was tried"),
        ("lab/paged_attention_gpu/#record", "Record"),
        ("results/paged_attention_gpu/", "Paged attention on a GPU"),
        ("results/scripts/", "Benchmarks"),
    ]
    index = tmp_path / "search.json"
    index.write_text(json.dumps({"items": [{"location": x, "title": y, "text": "words"} for x, y in items]}))
    refine(index)
    kept = {item["location"]: item for item in json.loads(index.read_text())["items"]}
    assert list(kept) == [
        "operations/paged_attention/",
        "api/types/",
        "api/types/#ejkernel.types.MaskInfo",
        "api/ejgpu/",
        "lab/paged_attention_gpu/",
        "results/paged_attention_gpu/",
        "results/scripts/",
    ]
    assert kept["lab/paged_attention_gpu/"]["title"] == "Lab notebook"
    assert kept["lab/paged_attention_gpu/"]["text"] == "words Record words"
    assert kept["operations/paged_attention/"]["title"] == "Paged attention"
    assert kept["api/types/"]["text"] == "words bias words"  # members are still found, by their page


def test_every_page_of_measurements_and_of_the_lab_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text()
    pages = [f"results/{path.name}" for path in (ROOT / "benchmarks/results").glob("*.md")]
    pages += [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    assert not [page for page in pages if f": {page}\n" not in navigation]


def test_links_of_pages_work_in_a_checkout_and_on_the_site():
    from generated_pages import finish

    built = {"order_of_choice.md", "support_matrix.md", "models.md", "upstream.md", "api/operations.md"}
    dead = []
    for page in pages_with_links():
        text = without_code_blocks(page.read_text())
        for link in re.findall(r"\]\(([^)#\s]+)", text):
            target = (page.parent / link).resolve()
            is_built = target.is_relative_to(ROOT / "docs") and str(target.relative_to(ROOT / "docs")) in built
            if not link.startswith(("http", "mailto:")) and not target.exists() and not is_built:
                dead.append(f"{page.relative_to(ROOT)}: {link}")
    assert not dead, "\n".join(dead)
    links = "[a](../../benchmarks/results/x_gpu.md#part), [b](../../benchmarks/README.md)"
    assert "[a](../results/x_gpu.md#part), [b](../results/scripts.md)" in finish(links, "operations/page.md")


def test_headings_that_links_name_exist(tmp_path):
    assert [link for page in pages_with_links() for link in dead_anchors(page)] == []
    (tmp_path / "other.md").write_text("# `f` of [a](b.md): 2\n## Twice\n## Twice\n")
    (tmp_path / "page.md").write_text("# Top\n[a](#top) [b](other.md#f-of-a-2) [c](other.md#twice_1)")
    assert dead_anchors(tmp_path / "page.md") == []
    (tmp_path / "page.md").write_text("# Top\n[a](#bottom) [b](other.md#f-of-a) [c](other.md#twice_2)")
    assert dead_anchors(tmp_path / "page.md") == [
        "page.md: page.md#bottom",
        "page.md: other.md#f-of-a",
        "page.md: other.md#twice_2",
    ]


def test_short_code_in_tables_stays_on_one_line():
    from generated_pages import finish

    table = "| `--dry-run` | `a` |\n\n`--dry-run`\n\n```text\n| `x` |\n```"
    expected = "| `--dry-run`{ .word } | `a`{ .word } |\n\n`--dry-run`\n\n```text\n| `x` |\n```"
    assert finish(table, "page.md") == expected
    linked = "| [`bias=`](page.md) of `f` | `code that is far too long to stay on one line` and `x` |"
    assert finish(linked, "page.md") == linked.replace("`f`", "`f`{ .word }").replace("`x`", "`x`{ .word }")


def test_the_readme_has_one_install_section_before_code_and_no_long_lines():
    text = (ROOT / "README.md").read_text()
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == ["Install", "Use", "Speed", "Operations", "Next steps"]
    assert max(map(len, text.splitlines())) <= 120
