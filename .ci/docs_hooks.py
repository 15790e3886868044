"""Adds generated pages to the site when MkDocs builds it; `build_site.py` does the same for Zensical."""

import os
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))
from generated_pages import VERSION, finish, generated


def on_config(config: Any) -> Any:
    """Shows the version, and the repository if its address is known, in the header; sets the address of the site."""
    config.site_name = f"ejkernel {VERSION}"
    config.repo_url = os.environ.get("EJKERNEL_REPOSITORY")
    config.site_url = os.environ.get("EJKERNEL_SITE")
    return config


def on_files(files: Files, config: Any) -> Files:
    """Adds the generated pages before MkDocs renders anything."""
    for path, content in generated().items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Adds links, dark figures and the note of the lab to a page."""
    return finish(markdown, page.file.src_uri)
