"""The modules that define the public names of `ejkernel.modules`, as the stub `__init__.pyi` lists them."""

import ast
import importlib
import pkgutil

OPERATIONS = "ejkernel.modules.operations."


def _listed() -> dict[str, tuple[str, ...]]:
    """Returns module -> the names that the stub imports from it."""
    stub = pkgutil.get_data("ejkernel.modules", "__init__.pyi") or b""
    imports = [node for node in ast.parse(stub).body if isinstance(node, ast.ImportFrom)]
    return {str(node.module): tuple(alias.name for alias in node.names) for node in imports}


_LISTED = _listed()

HOMES = {name: module for module, names in _LISTED.items() for name in names if name != "*"}
"""Public name -> the module that defines it, but for those of `WHOLE`."""

WHOLE = tuple(module for module, names in _LISTED.items() if "*" in names)
"""Modules whose `__all__` is public."""

EXPORTS = {
    module.removeprefix(OPERATIONS): names
    for module, names in _LISTED.items()
    if module.startswith(OPERATIONS) and module not in WHOLE
}
"""The module of every operation, which holds its `OP`, with the public names that it defines."""


def public_names() -> list[str]:
    """Returns all public names, sorted."""
    return sorted({*HOMES, *(name for module in WHOLE for name in importlib.import_module(module).__all__)})


def home(name: str) -> str | None:
    """Returns the module that defines a public name; None for any other name."""
    return HOMES.get(name) or next((m for m in WHOLE if name in importlib.import_module(m).__all__), None)
