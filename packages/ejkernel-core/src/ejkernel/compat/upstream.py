"""The page "Coming from upstream", made from `upstream.toml` and the earlier library's names and signatures."""

import sys
import tomllib
from pathlib import Path
from typing import Any

from ejkernel.compat.differences import differences, reason, upstream_surface
from ejkernel.ops.params import BaseOperationConfig
from ejkernel.ops.plugins import Registry
from ejkernel.ops.space import leaf_names

INTRODUCTION = """# Coming from upstream

Code written for the earlier library of this name, 0.0.80.3, and for EasyDeL 0.3, runs unchanged where this page does
not say otherwise. What exists for it alone is in `ejkernel.compat`.

## EasyDeL 0.3

EasyDeL 0.3.0 asks for `ejkernel==0.0.78` twice: in its metadata, and when it is imported. With uv, override the first
in the project that has both:

```toml
[tool.uv]
override-dependencies = ["ejkernel>=0.2"]
find-links = ["wheels"] # where the wheels of this library are
```

pip has no overrides. Install EasyDeL first, remove the `ejkernel` that came with it, and install this one. The order
matters: both libraries are a package of the same name, and removing the earlier one later takes files of this one away.

```bash
pip install easydel==0.3.0
pip uninstall --yes ejkernel
pip install --find-links wheels "ejkernel>=0.2"
```

pip then prints that EasyDeL asks for another version, and goes on. EasyDeL's models also import PyTorch and Pillow,
which it does not install, whichever ejkernel is there: `pip install torch pillow`. The second check is met by an
environment variable, which decides what `ejkernel.__version__` says, and nothing else:

```bash
export EJKERNEL_UPSTREAM_VERSION=0.0.78
export EASYDEL_AUTO=0 # otherwise EasyDeL sets flags of XLA that JAX 0.10 no longer has, and XLA ends the process
```

Small Llama, Qwen3-Next and DeepSeek-V3 models generate the same tokens with both libraries (EasyDeL 0.3.0, ejkernel
0.0.78, JAX 0.10.2, CPU), and so does EasyDeL's server for Llama with `ragged_page_attention_v2`,
`ragged_page_attention_v3` and `unified_attention`, for DeepSeek-V3 with both versions of
`multi_latent_ragged_page_attention`, and for Qwen3-Next with `ragged_page_attention_v3`, one request at a time. If two
Qwen3-Next requests share a batch, the tokens of EasyDeL's server change from run to run with either library. Logits of
padding differ, as the table of other meanings says of rows with nothing to attend.
"""

NAMES_SECTION = """## Names and signatures

All {total} public names of the earlier library's {modules} modules, and the methods of its classes, are compared with
those here: {missing} are missing, and {changed} take other arguments. Each has its reason here.
"""

UNREAD_FIELDS_SECTION = """## Fields of configurations that nothing reads

Public fields only tune. These are read by no kernel that is installed, so that they have no effect; `ejkernel.explain`
says so by name.
"""


def handwritten_tables() -> dict[str, Any]:
    """Returns the tables written by hand: `reason`, `unread` and `difference`."""
    return tomllib.loads(Path(__file__).with_name("upstream.toml").read_text(encoding="utf-8"))


def coming_from_upstream_page() -> str:
    """Returns the page, as Markdown."""
    tables = handwritten_tables()
    other = [(entry["topic"], entry["upstream"], entry["here"]) for entry in tables["difference"]]
    return "\n".join(
        (
            INTRODUCTION,
            names_and_signatures_table(tables["reason"]),
            UNREAD_FIELDS_SECTION,
            _markdown_table(("configuration", "fields"), [_unread_row(*item) for item in tables["unread"].items()]),
            "## Other meanings\n",
            _markdown_table(("topic", "upstream", "here"), other),
        )
    )


def names_and_signatures_table(reasons: dict[str, str]) -> str:
    """Returns the comparison of names, those with one reason in one row."""
    surface, changes = upstream_surface(), differences()
    rows: dict[tuple[str, str], dict[str, None]] = {}
    for name, difference in changes.items():
        word = name.rpartition(".")[2] if difference == "missing" else ".".join(name.rsplit(".", 2)[-2:])
        rows.setdefault((difference, reason(name, reasons) or ""), {})[f"`{word}`"] = None
    missing = sum(difference == "missing" for difference in changes.values())
    counts = {
        "total": sum(len(names) for names in surface.values()),
        "modules": len(surface),
        "missing": missing,
        "changed": len(changes) - missing,
    }
    lines = [(", ".join(words), difference, why) for (difference, why), words in rows.items()]
    return "\n".join((NAMES_SECTION.format(**counts), _markdown_table(("upstream", "here", "reason"), lines)))


def unread_fields(registered: Registry) -> dict[str, list[str]]:
    """Returns, by configuration class, the public fields that no registered kernel reads, as `upstream.toml` lists
    them.
    """
    unread: dict[str, list[str]] = {}
    for name, op in sorted(registered.ops.items()):
        spaces = [implementation.config for implementation in registered.implementations.get(name, ())]
        read = {
            field
            for space in spaces
            for role in ("forward", "backward", "both")
            for field in space.readable_public_fields(role)
        }
        fields = sorted(_public_fields(op.config) - read)
        if fields:
            unread[op.config.__name__] = fields
    return unread


def _unread_row(config: str, fields: list[str]) -> tuple[str, str]:
    return f"`{config}`", ", ".join(f"`{field}`" for field in fields)


def _public_fields(config: type[BaseOperationConfig]) -> set[str]:
    """Returns the fields of a configuration, or of its two parts."""
    parts = set(config.part_types.values()) or {config}
    return {field for part in parts for field in leaf_names(part)} - set(config.call_argument_fields)


def _markdown_table(column_titles: tuple[str, ...], rows: list[Any]) -> str:
    lines = [f"| {' | '.join(column_titles)} |", f"|{'---|' * len(column_titles)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows), ""])


def unexplained_differences() -> dict[str, str]:
    """Returns the differences without a reason."""
    reasons = handwritten_tables()["reason"]
    return {name: text for name, text in differences().items() if reason(name, reasons) is None}


def main(*options: str) -> int:
    """Prints the page; with `--strict` the differences without a reason, and 1 if there are any."""
    if "--strict" not in options:
        print(coming_from_upstream_page())
        return 0
    remaining = unexplained_differences()
    print("\n".join(f"{name}: {text}" for name, text in remaining.items()) or "Every difference has a reason.")
    return int(bool(remaining))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
