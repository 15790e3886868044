"""The public names and signatures of the installed `ejkernel`, as data: `python surface.py FILE.json` writes them.

It runs by its path next to the earlier library too, and so it imports nothing but Python's own modules before that. A
signature is text: its parameters, each with a mark of how it is given: `/` by position alone, nothing by position or
keyword, `=` by keyword alone, `*` and `**` for the rest. `new|old` is a parameter with two names.
"""

import importlib
import inspect
import json
import pkgutil
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

ObjectDescription = dict[str, str] | str
"""A function's parameters; a class as name -> parameters, with those of its constructor under `""`; or `"value"`."""

VALUE_DESCRIPTION = "value"
SAME_CLASS_PREFIX = "="
"""Begins what is said of a class that another module has too."""
PARAMETER_KIND_MARKS = {"POSITIONAL_ONLY": "/", "POSITIONAL_OR_KEYWORD": "", "KEYWORD_ONLY": "=", "VAR_POSITIONAL": "*"}


def public_modules() -> Iterator[str]:
    """Yields the modules of `ejkernel` whose path has no underscore; command lines and generated builds are none of
    them.
    """
    package = importlib.import_module("ejkernel")
    yield "ejkernel"
    for module_info in pkgutil.walk_packages(package.__path__, "ejkernel.", onerror=lambda name: None):
        if not any(part.startswith("_") for part in module_info.name.split(".")[1:]):
            yield module_info.name


def describe(modules: Iterable[str], names: Callable[[ModuleType], Iterable[str]] | None = None) -> dict[str, Any]:
    """Returns module -> public name -> what it is. Modules that cannot be imported are left out.

    Args:
        modules: Which.
        names: Those to describe of a module; None for `__all__` or what is defined there.
    """
    described: dict[str, Any] = {}
    seen: dict[Any, str] = {}
    for name in modules:
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        chosen = (names or _public_names)(module)
        values = {each: getattr(module, each) for each in chosen if hasattr(module, each)}
        described[name] = {}
        for each, value in values.items():
            known = seen.setdefault(value, f"{name}.{each}") if inspect.isclass(value) else f"{name}.{each}"
            described[name][each] = (
                _describe_object(value) if known == f"{name}.{each}" else f"{SAME_CLASS_PREFIX}{known}"
            )
    return described


def _public_names(module: ModuleType) -> list[str]:
    listed = getattr(module, "__all__", None)
    objects = ((n, x) for n, x in vars(module).items() if getattr(x, "__module__", None) == module.__name__)
    # A stand-in for what is not installed has a private name of its own.
    defined = (n for n, x in objects if not getattr(x, "__name__", n).startswith("_"))
    return sorted(n for n in (defined if listed is None else listed) if not n.startswith("_"))


def _describe_object(value: Any) -> ObjectDescription:
    if inspect.isclass(value):
        members = {"": _describe_signature(value)}
        owners = [kind for kind in value.__mro__ if kind.__module__.startswith("ejkernel")]
        for member in sorted({name for owner in owners for name in vars(owner) if not name.startswith("_")}):
            static = inspect.getattr_static(value, member)
            bound = getattr(value, member, None)
            simple = isinstance(static, property) or not callable(bound) or inspect.isclass(bound)
            members[member] = (
                VALUE_DESCRIPTION if simple else _describe_signature(bound, is_method=inspect.isfunction(static))
            )
        return members
    return _describe_signature(value) if callable(value) else VALUE_DESCRIPTION


def _describe_signature(value: Any, is_method: bool = False) -> str:
    try:
        parameters = list(inspect.signature(value).parameters.values())
    except (TypeError, ValueError):
        return VALUE_DESCRIPTION
    older = {name: f"|{old}" for old, name in getattr(value, "also_called", {}).items()}
    shown = parameters[1:] if is_method else parameters
    return " ".join(f"{p.name}{older.get(p.name, '')}{PARAMETER_KIND_MARKS.get(p.kind.name, '**')}" for p in shown)


def main(path: str) -> None:
    """Writes the names and signatures of the installed library."""
    warnings.simplefilter("ignore")
    with open(path, "w", encoding="utf-8") as file:
        json.dump(describe(public_modules()), file, indent=1, sort_keys=True)
        file.write("\n")


if __name__ == "__main__":
    main(sys.argv[1])
