"""The public names and signatures of the earlier library that are missing or different here, with the reasons."""

import fnmatch
import json
from pathlib import Path
from typing import Any

from ejkernel.compat.surface import NOT_CALLABLE, SAME_CLASS_PREFIX, Described, describe

UPSTREAM_SURFACE_FILE = Path(__file__).with_name("upstream_surface.json")
"""The names and signatures of upstream 0.0.80.3, which `nox -s upstream` compares with the library itself."""


def upstream_surface() -> dict[str, dict[str, Described]]:
    """Returns module -> public name -> what it is, in the earlier library."""
    return json.loads(UPSTREAM_SURFACE_FILE.read_text(encoding="utf-8"))


def differences() -> dict[str, str]:
    """`module.name`, or `module.Class.member`, of the earlier library -> what is missing or different here."""
    differing: dict[str, str] = {}
    for module, names in upstream_surface().items():
        for name, theirs in names.items():
            ours = _describe_here(module, name)
            differing |= _compare_name(f"{module}.{name}", theirs, ours)
    return differing


def reason(name: str, reasons: dict[str, str]) -> str | None:
    """Returns the reason of a difference: that of the first pattern that its name fits."""
    return next((text for pattern, text in reasons.items() if fnmatch.fnmatchcase(name, pattern)), None)


def _describe_here(module: str, name: str) -> Described | None:
    modules = describe([module], lambda _: [name])
    return modules.get(module, {}).get(name)


def _compare_name(name: str, upstream: Described, here: Described | None) -> dict[str, str]:
    if here is None:
        return {name: "missing"}
    if isinstance(upstream, str) and upstream.startswith(SAME_CLASS_PREFIX):
        return {}
    if isinstance(upstream, dict) and isinstance(here, str):
        upstream = upstream[""]  # a class there, a function here
    if isinstance(upstream, dict):
        members: dict[str, Any] = here if isinstance(here, dict) else {}
        differing: dict[str, str] = {}
        for member, described in upstream.items():
            path = f"{name}.{member}" if member else name
            differing |= _compare_name(path, described, members.get(member))
        return differing
    signature_here = here[""] if isinstance(here, dict) else here
    difference = (
        ""
        if NOT_CALLABLE in (upstream, signature_here)
        else _signature_difference(upstream.split(), signature_here.split())
    )
    return {name: difference} if difference else {}


def _signature_difference(theirs: list[str], here: list[str]) -> str:
    """Returns the arguments that a call of the earlier library has and that are not taken here, or elsewhere."""
    names = {name for parameter in here for name in _argument_names(parameter)}
    takes_any = any(parameter.endswith("**") for parameter in here)
    expected = [parameter for parameter in theirs if not parameter.endswith("*")]
    missing = [p.rstrip("=") for p in expected if not p.endswith("/") and p.rstrip("=") not in names and not takes_any]
    positional = [parameter for parameter in here if not parameter.endswith(("=", "*"))]
    moved: list[str] = []
    if not any(parameter.endswith("*") and not parameter.endswith("**") for parameter in here):
        for index, parameter in enumerate(p for p in expected if not p.endswith("=")):
            word = parameter.rstrip("/")
            at = _argument_names(positional[index]) if index < len(positional) else ()
            if word not in missing and word not in at and not (parameter.endswith("/") and at):
                moved.append(word)
    parts = [f"no {', '.join(missing)}"] if missing else []
    parts += [f"other position of {', '.join(moved)}"] if moved else []
    return "; ".join(parts)


def _argument_names(parameter: str) -> tuple[str, ...]:
    return tuple(parameter.rstrip("/=*").split("|"))
