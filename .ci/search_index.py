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
MEMBER = re.compile(r"#ejkernel\.[a-z_.]*[A-Z]\w*\.\w+|#ejkernel\.modules\.[A-Z]|#ejkernel\.compat\.")
"""Members of a class, classes on an operation's page, and helpers for callers of earlier libraries."""


def refine(index: Path) -> None:
    """Rewrites `search.json`: members of classes, and sections of measurements, become text of their page's entry."""
    content = json.loads(index.read_text(encoding="utf-8"))
    pages: dict[str, dict[str, Any]] = {}
    kept: list[dict[str, Any]] = []
    for item in content["items"]:
        page = item["location"].partition("#")[0]
        is_record = RECORDS.match(page)
        if page in pages and (is_record or MEMBER.search(item["location"])):
            pages[page]["text"] += f" {item['title']} {item['text']}"
            continue
        if is_record:
            item["title"] = "Lab notebook" if page.startswith("lab/") else "Measurements"
        pages.setdefault(page, item)
        kept.append(item)
    content["items"] = kept
    index.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
