"""The public names and signatures of the earlier library that are missing or different here, with the reasons."""

import fnmatch
import json
from pathlib import Path
from typing import Any

from ejkernel.compat.surface import SAME, VALUE, Described, describe

UPSTREAM = Path(__file__).with_name("upstream_surface.json")
"""The names and signatures of upstream 0.0.80.3, which `nox -s upstream` compares with the library itself."""


def upstream_surface() -> dict[str, dict[str, Described]]:
    """Returns module -> public name -> what it is, in the earlier library."""
    return json.loads(UPSTREAM.read_text(encoding="utf-8"))


def differences() -> dict[str, str]:
    """`module.name`, or `module.Class.member`, of the earlier library -> what is missing or different here."""
    differing: dict[str, str] = {}
    for module, names in upstream_surface().items():
        for name, theirs in names.items():
            ours = _lookup(module, name)
            differing |= _compared(f"{module}.{name}", theirs, ours)
    return differing


def reason(name: str, reasons: dict[str, str]) -> str | None:
    """Returns the reason of a difference: that of the first pattern that its name fits."""
    return next((text for pattern, text in reasons.items() if fnmatch.fnmatchcase(name, pattern)), None)


def _lookup(module: str, name: str) -> Described | None:
    modules = describe([module], lambda _: [name])
    return modules.get(module, {}).get(name)


def _compared(name: str, theirs: Described, here: Described | None) -> dict[str, str]:
    if here is None:
        return {name: "missing"}
    if isinstance(theirs, str) and theirs.startswith(SAME):
        return {}
    if isinstance(theirs, dict) and isinstance(here, str):
        theirs = theirs[""]  # a class there, a function here
    if isinstance(theirs, dict):
        members: dict[str, Any] = here if isinstance(here, dict) else {}
        differing: dict[str, str] = {}
        for member, described in theirs.items():
            path = f"{name}.{member}" if member else name
            differing |= _compared(path, described, members.get(member))
        return differing
    signature_here = here[""] if isinstance(here, dict) else here
    difference = "" if VALUE in (theirs, signature_here) else _signatures(theirs.split(), signature_here.split())
    return {name: difference} if difference else {}


def _signatures(theirs: list[str], here: list[str]) -> str:
    """Returns the arguments that a call of the earlier library has and that are not taken here, or elsewhere."""
    names = {name for parameter in here for name in _names(parameter)}
    takes_any = any(parameter.endswith("**") for parameter in here)
    expected = [parameter for parameter in theirs if not parameter.endswith("*")]
    missing = [p.rstrip("=") for p in expected if not p.endswith("/") and p.rstrip("=") not in names and not takes_any]
    positional = [parameter for parameter in here if not parameter.endswith(("=", "*"))]
    moved: list[str] = []
    if not any(parameter.endswith("*") and not parameter.endswith("**") for parameter in here):
        for index, parameter in enumerate(p for p in expected if not p.endswith("=")):
            word = parameter.rstrip("/")
            at = _names(positional[index]) if index < len(positional) else ()
            if word not in missing and word not in at and not (parameter.endswith("/") and at):
                moved.append(word)
    parts = [f"no {', '.join(missing)}"] if missing else []
    parts += [f"other position of {', '.join(moved)}"] if moved else []
    return "; ".join(parts)


def _names(parameter: str) -> tuple[str, ...]:
    return tuple(parameter.rstrip("/=*").split("|"))
