"""JAX kernels for attention, state-space and mixture-of-experts models.

One call per operation (`ejkernel.modules`), the fastest correct kernel for the device it runs on, and the same meaning
on every device. `ejkernel.explain` says which kernel a call would use and why.
"""

import importlib
from typing import TYPE_CHECKING, Any

from ejkernel.compat import paths

if TYPE_CHECKING:
    from ejkernel import errors, modules, ops, types
    from ejkernel._version import __version__
    from ejkernel.compat import callib, kernel_registry, utils, xla_utils
    from ejkernel.compat import ejgpu as ejgpu
    from ejkernel.compat import loggings as loggings
    from ejkernel.errors import EjkernelRuntimeError
    from ejkernel.ops.explain import explain
    from ejkernel.platforms import Backend, Platform

__all__ = [
    "Backend",
    "EjkernelRuntimeError",
    "Platform",
    "__version__",
    "callib",
    "errors",
    "explain",
    "kernel_registry",
    "modules",
    "ops",
    "types",
    "utils",
    "xla_utils",
]

paths.install_old_paths()

# Nothing here imports JAX before it is used: `ejkernel --help` imports this module.
_MODULE_OF_NAME = {
    "Backend": "platforms",
    "EjkernelRuntimeError": "errors",
    "Platform": "platforms",
    "explain": "ops.explain",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("ejkernel.compat.version").reported_version()
    if name in _MODULE_OF_NAME:
        return getattr(importlib.import_module(f"ejkernel.{_MODULE_OF_NAME[name]}"), name)
    if name in __all__ or f"ejkernel.{name}" in paths.OLD_PATHS:
        return importlib.import_module(f"ejkernel.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
