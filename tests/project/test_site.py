"""The site: search leads to guides first, the navigation has every page, and tables keep names whole."""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / ".ci"))


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
    pages = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md"), *ROOT.glob("*.md")]
    dead = []
    for page in pages:
        text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        for link in re.findall(r"\]\(([^)#\s]+)", text):
            target = (page.parent / link).resolve()
            is_built = target.is_relative_to(ROOT / "docs") and str(target.relative_to(ROOT / "docs")) in built
            if not link.startswith(("http", "mailto:")) and not target.exists() and not is_built:
                dead.append(f"{page.relative_to(ROOT)}: {link}")
    assert not dead, "\n".join(dead)
    links = "[a](../../benchmarks/results/x_gpu.md#part), [b](../../benchmarks/README.md)"
    assert "[a](../results/x_gpu.md#part), [b](../results/scripts.md)" in finish(links, "operations/page.md")


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
