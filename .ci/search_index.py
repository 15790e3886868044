"""Edits the search index that Zensical writes, so that the first result is the page that a user wants.

Zensical ranks by the words of titles and knows no weights for pages. Lab notebooks, tables of measurements and members
of classes have the words of the guides in their titles, and would come first.
"""

import json
import re
from pathlib import Path
from typing import Any

RECORDS = re.compile(r"(lab|results)/(?!scripts)")
"""Pages that record measurements."""
MEMBER = re.compile(r"#ejkernel\.[a-z_.]*[A-Z]\w*\.\w+|#ejkernel\.compat\.")
"""Attributes and methods of a class, and helpers for callers of earlier libraries."""


def refine(index: Path) -> None:
    """Rewrites `search.json`: leaves members of classes out, and makes one entry of each page of measurements."""
    content = json.loads(index.read_text(encoding="utf-8"))
    pages: dict[str, dict[str, Any]] = {}
    kept: list[dict[str, Any]] = []
    for item in content["items"]:
        page = item["location"].partition("#")[0]
        if MEMBER.search(item["location"]):
            continue
        if not RECORDS.match(page):
            kept.append(item)
        elif page in pages:
            pages[page]["text"] += f" {item['title']} {item['text']}"
        else:
            pages[page] = item | {"title": "Lab notebook" if page.startswith("lab/") else "Measurements"}
    content["items"] = kept + list(pages.values())
    index.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
