"""The pages of the site that are generated, and what is added to every page before it is rendered.

`docs_hooks.py` calls this for MkDocs, and `build_site.py` for Zensical.
"""

import os
import posixpath
import re
import sys
import tomllib
from pathlib import Path

import ejkernel.modules
from ejkernel.cli.ops import support_matrix
from ejkernel.compat.upstream import coming_from_upstream_page
from ejkernel.modules.base import Kernel
from ejkernel.ops.plugins import registry

sys.path.insert(0, str(Path(__file__).parent))
from models_page import models_page
from order_of_choice import order_of_choice

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"
FIGURES = ROOT / "docs/figures"
GROUPS = tomllib.loads((Path(__file__).parent / "operation_pages.toml").read_text())
CITED = re.compile(r"(?<!\[)`benchmarks/results/(\w+\.md)`")
"""A table of measurements that a page cites by its path in the repository."""
LINKED = re.compile(r"\]\((?:\.\./)+benchmarks/(?:results/(\w+\.md)|README\.md)")
"""A link to a table of measurements, or to the list of the scripts, as it works in a checkout."""
FIGURE = re.compile(r"!\[([^\]]*)\]\(([./\w]*figures/)(\w+)\.svg\)")
TERMS = {
    "implementation": "implementations?",
    "family": "family|families",
    "verdict": "verdicts?",
    "refusal": "refusals?|refused",
    "residuals": "residuals",
    "heuristic": "heuristics?",
    "evidence": "evidence|confirmed",
}
"""The project's own terms: the anchor in the glossary, and how a page may write the term."""
CODE = re.compile(r"(?P<link>\[?)(?P<ticks>`+)(?P<text>[^\n]+?)(?P=ticks)(?!`)(?P<marked>\{?)")
"""Code within a line: every span is matched, so that the end of one is never taken for the beginning of another."""
LONGEST_WORD = 40
"""Characters of code in tables that stays on one line even where it has spaces."""
KEPT = re.compile(r"(`[^`]*`|\[[^\]]*\]\([^)]*\)|<[^>]*>|https?://\S+)")
"""Code, links and tags within a line."""
LAB = """!!! note "Lab notebook"

    This page records what was tried and measured while the kernels were written, in the order of the work. Names and
    figures are those of that time. [The pages about kernels](../{kernels}) describe what ships.

"""
KERNEL_PAGES = {"hopper": "pallas_gpu.md", "cuda": "cuda.md", "tpu": "pallas_tpu.md"}
VERSION = ejkernel.__version__
MODELS_LATER = "# Models\n\n`EJKERNEL_DOCS_MODELS=skip` left this page out: its errors are measured by a build.\n"


def generated() -> dict[str, str]:
    """Returns the generated pages by their path under `docs`.

    The page about models runs every recipe, which takes minutes; `EJKERNEL_DOCS_MODELS=skip` leaves that out.
    """
    found = registry()
    pages = {
        "support_matrix.md": support_matrix(found),
        "order_of_choice.md": order_of_choice(found),
        "upstream.md": coming_from_upstream_page(),
        "models.md": MODELS_LATER if os.environ.get("EJKERNEL_DOCS_MODELS") == "skip" else models_page(),
        "api/operations.md": api_index(),
    }
    pages |= {f"api/{name}.md": api_page(name, page) for group in GROUPS.values() for name, page in group.items()}
    scripts = (BENCHMARKS / "README.md").read_text()
    for path in (BENCHMARKS / "results").glob("*.md"):
        content = path.read_text().replace("../../docs/", "../")
        pages[f"results/{path.name}"] = results_page(path.name, content)
        scripts = re.sub(rf"\| (`\w+/{path.stem}\.py`) \|", rf"| [\1]({path.name}) |", scripts)
    return pages | {"results/scripts.md": scripts}


def results_page(name: str, content: str) -> str:
    """Returns a page of measurements with one title, and the file that holds them."""
    title = f"Measurements: {Path(name).stem.replace('_', ' ')}"
    first, _, rest = content.partition("\n")
    if first.startswith("# "):
        title, content = first[2:], rest.lstrip("\n")
    return f"# {title}\n\nThis page shows the file *benchmarks/results/{name}*.\n\n{content}"


def api_index() -> str:
    """Returns the page that lists the operations with the first sentence of each docstring."""
    lines = ["# Operations", "", "One function per operation, imported from `ejkernel.modules`."]
    for group, pages in GROUPS.items():
        lines += ["", f"## {group}", "", "| function | computes |", "|---|---|"]
        lines += [f"| [`{name}`]({name}.md) | {_first_sentence(name)} |" for name in pages]
    return "\n".join([*lines, ""])


def _first_sentence(name: str) -> str:
    doc = getattr(ejkernel.modules, name).__doc__ or ""
    return " ".join(doc.split("\n\n")[0].split())


def api_page(name: str, guide: str) -> str:
    """Returns the API page of an operation: its function first, then its class and configuration."""
    links = f"[Guide](../{guide}) · [support matrix](../support_matrix.md#{name}) · [all operations](operations.md)"
    objects = [name, *aliases(name), *classes(name)]
    return f"# {name}\n\n{links}\n\n" + "\n\n".join(f"::: ejkernel.modules.{x}" for x in objects) + "\n"


def aliases(name: str) -> list[str]:
    """Returns the other public functions of the operation's module, such as `kda_decay`."""
    module = f"ejkernel.modules.operations.{name}"
    public = {x: getattr(ejkernel.modules, x) for x in ejkernel.modules.__all__ if x != name}
    found = [x for x, value in public.items() if value.__module__ == module and not isinstance(value, type)]
    return [x for x in found if x not in GROUPED]


def classes(name: str) -> list[str]:
    """Returns the `Kernel` classes of an operation and their configuration classes."""
    module = f"ejkernel.modules.operations.{name}"
    public = {x: getattr(ejkernel.modules, x) for x in ejkernel.modules.__all__}
    kernels = [x for x, y in public.items() if isinstance(y, type) and issubclass(y, Kernel) and y.__module__ == module]
    return kernels + [f"{x}Config" for x in kernels if f"{x}Config" in public]


GROUPED = {name for pages in GROUPS.values() for name in pages}


def finish(markdown: str, path: str) -> str:
    """Returns a page with links to measurements and to the glossary, dark figures, and the note on pages of the lab."""
    folder = posixpath.dirname(path) or "."
    results = posixpath.relpath("results", folder)
    markdown = LINKED.sub(lambda link: f"]({results}/{link[1] or 'scripts.md'}", markdown)
    markdown = CITED.sub(rf"[`benchmarks/results/\1`]({results}/\1)", markdown)
    markdown = FIGURE.sub(_both_themes, markdown)
    markdown = _unbroken_code(markdown)
    if path != "glossary.md" and not path.startswith(("api/", "results/", "lab/")):
        markdown = link_terms(markdown, posixpath.relpath("glossary.md", folder))
    if not path.startswith("lab/"):
        return markdown
    title, _, rest = markdown.partition("\n\n")
    kernels = next((page for word, page in KERNEL_PAGES.items() if word in path), "triton.md")
    return f"{title}\n\n{LAB.format(kernels=kernels)}{rest}"


def link_terms(markdown: str, glossary: str) -> str:
    """Returns a page in which the first use of each of the project's own terms links the glossary.

    Headings, tables, code and links stay as they are.
    """
    left, lines, in_code = dict(TERMS), [], False
    for line in markdown.split("\n"):
        in_code ^= line.lstrip().startswith("```")
        if not in_code and line[:1] not in ("#", "|", "!", ":", " ", "`", "<"):
            pieces = KEPT.split(line)
            for n in range(0, len(pieces), 2):
                pieces[n] = _linked(pieces[n], left, glossary)
            line = "".join(pieces)
        lines.append(line)
    return "\n".join(lines)


def _linked(text: str, left: dict[str, str], glossary: str) -> str:
    """Links the terms of a text that are still to be linked, and takes them out of `left`."""
    for anchor, pattern in list(left.items()):
        text, count = re.subn(rf"\b({pattern})\b(?![^[]*\]\()", rf"[\1]({glossary}#{anchor})", text, count=1)
        if count:
            del left[anchor]
    return text


def _unbroken_code(markdown: str) -> str:
    """Marks short code in tables, which `pages.css` then keeps on one line: browsers break it at hyphens otherwise."""
    lines, in_code = [], False
    for line in markdown.split("\n"):
        in_code ^= line.lstrip().startswith("```")
        lines.append(CODE.sub(_with_class, line) if line.startswith("|") and not in_code else line)
    return "\n".join(lines)


def _with_class(code: re.Match[str]) -> str:
    """Returns code with the class `word`; links, longer code and code that has a class already stay as they are."""
    is_short = len(code["text"]) <= LONGEST_WORD or not re.search(r"\s", code["text"])
    if code["link"] or code["marked"] or code["ticks"] != "`" or not is_short:
        return code[0]
    return f"{code[0]}{{ .word }}"


def _both_themes(figure: re.Match[str]) -> str:
    """Shows a figure on light pages and its dark variant, if there is one, on dark pages."""
    text, folder, name = figure.groups()
    if not (FIGURES / f"{name}_dark.svg").exists():
        return figure.group()
    return f"![{text}]({folder}{name}.svg#only-light)\n![{text}]({folder}{name}_dark.svg#only-dark)"
