"""The public names and signatures of the earlier library that are missing or different here, with the reasons."""

import fnmatch
import json
from pathlib import Path
from typing import Any

from ejkernel.compat.surface import SAME_CLASS_PREFIX, VALUE_DESCRIPTION, ObjectDescription, describe

UPSTREAM_SURFACE_FILE = Path(__file__).with_name("upstream_surface.json")
"""The names and signatures of upstream 0.0.80.3, which `nox -s upstream` compares with the library itself."""


def upstream_surface() -> dict[str, dict[str, ObjectDescription]]:
    """Returns module -> public name -> what it is, in the earlier library."""
    return json.loads(UPSTREAM_SURFACE_FILE.read_text(encoding="utf-8"))


def differences() -> dict[str, str]:
    """`module.name`, or `module.Class.member`, of the earlier library -> what is missing or different here."""
    differing: dict[str, str] = {}
    for module, names in upstream_surface().items():
        for name, theirs in names.items():
            ours = _describe_in_this_library(module, name)
            differing |= _compare_name(f"{module}.{name}", theirs, ours)
    return differing


def reason(name: str, reasons: dict[str, str]) -> str | None:
    """Returns the reason of a difference: that of the first pattern that its name fits."""
    return next((text for pattern, text in reasons.items() if fnmatch.fnmatchcase(name, pattern)), None)


def _describe_in_this_library(module: str, name: str) -> ObjectDescription | None:
    modules = describe([module], lambda _: [name])
    return modules.get(module, {}).get(name)


def _compare_name(
    name: str, upstream_description: ObjectDescription, description_here: ObjectDescription | None
) -> dict[str, str]:
    if description_here is None:
        return {name: "missing"}
    if isinstance(upstream_description, str) and upstream_description.startswith(SAME_CLASS_PREFIX):
        return {}
    if isinstance(upstream_description, dict) and isinstance(description_here, str):
        upstream_description = upstream_description[""]  # a class there, a function here
    if isinstance(upstream_description, dict):
        members: dict[str, Any] = description_here if isinstance(description_here, dict) else {}
        differing: dict[str, str] = {}
        for member, described in upstream_description.items():
            path = f"{name}.{member}" if member else name
            differing |= _compare_name(path, described, members.get(member))
        return differing
    signature_here = description_here[""] if isinstance(description_here, dict) else description_here
    difference = (
        ""
        if VALUE_DESCRIPTION in (upstream_description, signature_here)
        else _signature_difference(upstream_description.split(), signature_here.split())
    )
    return {name: difference} if difference else {}


def _signature_difference(upstream_parameters: list[str], parameters_here: list[str]) -> str:
    """Returns the arguments that a call of the earlier library has and that are not taken here, or elsewhere."""
    names = {name for parameter in parameters_here for name in _argument_names(parameter)}
    takes_any = any(parameter.endswith("**") for parameter in parameters_here)
    expected = [parameter for parameter in upstream_parameters if not parameter.endswith("*")]
    missing = [p.rstrip("=") for p in expected if not p.endswith("/") and p.rstrip("=") not in names and not takes_any]
    positional = [parameter for parameter in parameters_here if not parameter.endswith(("=", "*"))]
    moved: list[str] = []
    if not any(parameter.endswith("*") and not parameter.endswith("**") for parameter in parameters_here):
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
