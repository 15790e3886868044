"""The page "Order of choice": in which order dispatch considers the implementations of each family."""

import inspect
from collections.abc import Iterable

from ejkernel.ops.model import Implementation
from ejkernel.ops.plugins import Registry

INTRODUCTION = """# Order of choice

Dispatch orders the implementations of an operation by these rules, and runs the first of those that can serve the call:

1. With `platform=`, only implementations of that toolchain are left.
2. An implementation is refused if it does not support the device, the dtype, the head size or an argument of the call.
   What it supports is in the [support matrix](support_matrix.md).
3. On a GPU, implementations that a chip has [confirmed](evidence.md) with the installed toolchain come before all
   others, whatever their priority.
4. Among confirmed implementations, and among the others, the highest priority is first; equal priorities go by name.

[`ejkernel.explain`](architecture.md#verdicts-refused-unless-granted) shows the result for a call. The tables list the
registered implementations, highest priority first. The build of this page generates them.
"""
DEVICES = {"nvidia": "NVIDIA", "amd": "AMD", "tpu": "TPU", "cpu": "CPU", "gpu": "GPU"}


def order_of_choice(found: Registry) -> str:
    """Returns the page in Markdown, with a section per family."""
    families: dict[str, tuple[list[str], dict[str, Implementation]]] = {}
    for name, op in sorted(found.ops.items()):
        operations, implementations = families.setdefault(op.family.name, ([], {}))
        operations.append(name)
        implementations |= {one.name: one for one in found.implementations.get(name, ())}
    sections = (_section(name, *families[name]) for name in sorted(families))
    return "\n".join([INTRODUCTION, *sections])


def _section(family: str, operations: list[str], implementations: dict[str, Implementation]) -> str:
    title = family.replace("_", " ").capitalize()
    links = ", ".join(f"[`{name}`](api/{name}.md)" for name in operations)
    rows = "\n".join(_rows(sorted(implementations.values(), key=_order)))
    head = "| implementation | platform | devices | priority | serves |\n|---|---|---|---|---|"
    return f"## {title}\n\n{links}\n\n{head}\n{rows}\n"


def _order(one: Implementation) -> tuple[bool, int, str]:
    fixed = isinstance(one.priority, int)
    return (fixed, -one.priority if isinstance(one.priority, int) else 0, one.name)


def _rows(implementations: Iterable[Implementation]) -> Iterable[str]:
    for one in implementations:
        devices = ", ".join(DEVICES.get(device, device) for device in sorted(one.requires.devices))
        serves = "all of the family" if one.only is None else ", ".join(f"`{name}`" for name in sorted(one.only))
        yield f"| `{one.name}` | `{one.platform}` | {devices} | {_priority(one.priority)} | {serves} |"


def _priority(priority: object) -> str:
    """Returns the number, or what the documentation of a function that computes it says."""
    if not callable(priority):
        return str(priority)
    doc = inspect.getdoc(priority) or "computed from the call"
    return "by call: " + " ".join(doc.split("\n\n")[0].split()).removeprefix("Returns ")
