"""The modules that define the public names of `ejkernel.modules`, as the stub `__init__.pyi` lists them."""

import ast
import importlib
import pkgutil

OPERATIONS_PACKAGE_PREFIX = "ejkernel.modules.operations."


def _names_in_stub() -> dict[str, tuple[str, ...]]:
    """Returns module -> the names that the stub imports from it."""
    stub = pkgutil.get_data("ejkernel.modules", "__init__.pyi") or b""
    imports = [node for node in ast.parse(stub).body if isinstance(node, ast.ImportFrom)]
    return {str(node.module): tuple(alias.name for alias in node.names) for node in imports}


_NAMES_BY_MODULE = _names_in_stub()

MODULE_OF_NAME = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names if name != "*"}
"""Public name -> the module that defines it, but for those of `MODULES_EXPORTED_WHOLE`."""

MODULES_EXPORTED_WHOLE = tuple(module for module, names in _NAMES_BY_MODULE.items() if "*" in names)
"""Modules whose `__all__` is public."""

EXPORTS = {
    module.removeprefix(OPERATIONS_PACKAGE_PREFIX): names
    for module, names in _NAMES_BY_MODULE.items()
    if module.startswith(OPERATIONS_PACKAGE_PREFIX) and module not in MODULES_EXPORTED_WHOLE
}
"""The module of every operation, which holds its `OP`, with the public names that it defines."""


def public_names() -> list[str]:
    """Returns all public names, sorted."""
    return sorted(
        {
            *MODULE_OF_NAME,
            *(name for module in MODULES_EXPORTED_WHOLE for name in importlib.import_module(module).__all__),
        }
    )


def defining_module(name: str) -> str | None:
    """Returns the module that defines a public name; None for any other name."""
    return MODULE_OF_NAME.get(name) or next(
        (m for m in MODULES_EXPORTED_WHOLE if name in importlib.import_module(m).__all__), None
    )
