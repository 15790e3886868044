"""Pages of the site that are generated: MkDocs calls `on_files` before it renders anything."""

from typing import Any

from mkdocs.structure.files import File, Files

from ejkernel.cli.ops import support_matrix
from ejkernel.cli.upstream import upstream_page
from ejkernel.ops.plugins import registry


def on_files(files: Files, config: Any) -> Files:
    """Adds the support matrix of the installed backends, and what code for the earlier library finds here."""
    files.append(File.generated(config, "support_matrix.md", content=support_matrix(registry())))
    files.append(File.generated(config, "upstream.md", content=upstream_page()))
    return files
