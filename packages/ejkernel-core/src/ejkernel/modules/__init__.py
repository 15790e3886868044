"""The public operations: functions, and classes for code that carries operations around as objects.

The stub `__init__.pyi` is the one list of the names and of the modules that define them. A name is imported when it is
first used, and with it only the operation it belongs to.
"""

import importlib
from typing import Any

from ejkernel.modules.exports import defining_module, public_names


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return public_names()
    module = defining_module(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *public_names()})
