"""Pages of the site that are generated: MkDocs calls `on_files` before it renders anything."""

from typing import Any

from mkdocs.structure.files import File, Files

from ejkernel.cli.ops import support_matrix
from ejkernel.ops.plugins import registry


def on_files(files: Files, config: Any) -> Files:
    """Adds the support matrix of the installed backends."""
    files.append(File.generated(config, "support_matrix.md", content=support_matrix(registry())))
    return files
