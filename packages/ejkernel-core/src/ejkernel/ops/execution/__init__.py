"""Carrying calls out: kernels as objects, executors, tuning."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ejkernel.errors import TunerError
    from ejkernel.ops.execution.batching import vmap_with_config
    from ejkernel.ops.execution.executor import Executor, create_default_executor
    from ejkernel.ops.execution.kernel import Invocation, Kernel
    from ejkernel.ops.execution.offline import autotune_recorded, tune_abstract
    from ejkernel.ops.execution.tuner import Measurement, Tuner, TuningResult

_HOMES = {
    "batching": ("vmap_with_config",),
    "executor": ("Executor", "create_default_executor"),
    "kernel": ("Invocation", "Kernel"),
    "offline": ("autotune_recorded", "tune_abstract"),
    "tuner": ("Measurement", "Tuner", "TunerError", "TuningResult"),
}
_MODULES = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "Executor",
    "Invocation",
    "Kernel",
    "Measurement",
    "Tuner",
    "TunerError",
    "TuningResult",
    "autotune_recorded",
    "create_default_executor",
    "tune_abstract",
    "vmap_with_config",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        return importlib.import_module("ejkernel.compat.paths").old_name(__name__, name)
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
