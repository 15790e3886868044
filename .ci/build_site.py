"""Builds the site with Zensical: writes `docs`, the generated pages and the configuration to `.site`, then builds it.

    python .ci/build_site.py           # any warning is an error; the site is in `.site/site`
    python .ci/build_site.py --serve   # shows it on this machine

`EJKERNEL_REPOSITORY` is the address that the header links to; without it there is no link. `EJKERNEL_SITE` is the
address where the site is published: a sitemap lists whole addresses, so without it `sitemap.xml` is empty.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from generated_pages import ROOT, VERSION, finish, generated
from search_index import refine

SITE = ROOT / ".site"


def write() -> Path:
    """Writes everything that Zensical reads, and returns the path of its configuration."""
    shutil.rmtree(SITE, ignore_errors=True)
    shutil.copytree(ROOT / "docs", SITE / "docs", ignore=shutil.ignore_patterns("*.py", "__pycache__", "words.toml"))
    pages = {path.relative_to(SITE / "docs").as_posix(): path.read_text() for path in (SITE / "docs").rglob("*.md")}
    for path, content in (pages | generated()).items():
        target = SITE / "docs" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(finish(content, path))
    config = (ROOT / "mkdocs.yml").read_text()
    for folder in ("packages/ejkernel-core/", ".ci/griffe"):  # paths from `.site`, where Zensical runs
        config = config.replace(folder, f"../{folder}")
    config = config.replace("site_name: ejkernel", f"site_name: ejkernel {VERSION}")
    if repository := os.environ.get("EJKERNEL_REPOSITORY"):
        config += f"\nrepo_url: {repository}\n"
    if site := os.environ.get("EJKERNEL_SITE"):
        config += f"\nsite_url: {site}\n"
    (SITE / "mkdocs.yml").write_text(config)
    return SITE / "mkdocs.yml"


if __name__ == "__main__":
    command = ["serve"] if "--serve" in sys.argv else ["build", "--strict", "--clean"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(["zensical", *command, "-f", str(write())], cwd=ROOT, env=environment, check=False)
    if "build" in command and done.returncode == 0:
        refine(SITE / "site" / "search.json")
    sys.exit(done.returncode)
