"""The errors of the library that a caller may want to catch by name."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ejkernel.ops.config.agreement import AgreementError
    from ejkernel.ops.config.chain import NoConfigError
    from ejkernel.ops.config.measurement import TunerError
    from ejkernel.ops.dispatch import NoImplementationError

__all__ = ["AgreementError", "EjkernelRuntimeError", "NoConfigError", "NoImplementationError", "TunerError"]

_HOMES = {
    "AgreementError": "ejkernel.ops.config.agreement",
    "NoConfigError": "ejkernel.ops.config.chain",
    "NoImplementationError": "ejkernel.ops.dispatch",
    "TunerError": "ejkernel.ops.config.measurement",
}


class EjkernelRuntimeError(RuntimeError):
    """A call is right, and cannot be carried out here: no kernel serves it, or no configuration is allowed."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
