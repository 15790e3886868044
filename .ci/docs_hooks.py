"""Pages of the site that are generated: MkDocs calls `on_files` before it renders anything."""

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from ejkernel.cli.ops import support_matrix
from ejkernel.compat.upstream import upstream_page
from ejkernel.ops.plugins import registry

sys.path.insert(0, str(Path(__file__).parent))
from models_page import models_page

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
CITED = re.compile(r"(?<!\[)`benchmarks/results/(\w+\.md)`")
"""A table of measurements that a page cites by its path in the repository."""


def on_files(files: Files, config: Any) -> Files:
    """Adds the support matrix of the installed backends, the models, what code for the earlier library
    finds here, and results."""
    files.append(File.generated(config, "support_matrix.md", content=support_matrix(registry())))
    files.append(File.generated(config, "upstream.md", content=upstream_page()))
    files.append(File.generated(config, "models.md", content=models_page()))
    scripts = (BENCHMARKS / "README.md").read_text()
    for path in (BENCHMARKS / "results").glob("*.md"):
        content = f"# benchmarks/results/{path.name}\n\n{path.read_text()}"
        files.append(File.generated(config, f"results/{path.name}", content=content))
        scripts = scripts.replace(f"| `{path.stem}.py` |", f"| [`{path.stem}.py`]({path.name}) |")
    files.append(File.generated(config, "results/index.md", content=scripts))
    return files


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Links the tables of measurements that a page cites, so that device, versions and command are one click away."""
    results = posixpath.relpath("results", posixpath.dirname(page.file.src_uri) or ".")
    return CITED.sub(rf"[`benchmarks/results/\1`]({results}/\1)", markdown)
