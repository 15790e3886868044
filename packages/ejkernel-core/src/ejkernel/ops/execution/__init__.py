"""Carrying calls out: kernels as objects, executors, tuning."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ejkernel.errors import TunerError
    from ejkernel.ops.config.measurement import Measurement, TuningResult
    from ejkernel.ops.config.tuner import Tuner
    from ejkernel.ops.execution.batching import vmap_with_config
    from ejkernel.ops.execution.executor import Executor, create_default_executor
    from ejkernel.ops.execution.kernel import Invocation, Kernel
    from ejkernel.ops.execution.offline import autotune_recorded, tune_abstract

_NAMES_BY_MODULE = {
    "ejkernel.ops.execution.batching": ("vmap_with_config",),
    "ejkernel.ops.execution.executor": ("Executor", "create_default_executor"),
    "ejkernel.ops.execution.kernel": ("Invocation", "Kernel"),
    "ejkernel.ops.execution.offline": ("autotune_recorded", "tune_abstract"),
    "ejkernel.errors": ("TunerError",),
    "ejkernel.ops.config.measurement": ("Measurement", "TuningResult"),
    "ejkernel.ops.config.tuner": ("Tuner",),
}
_MODULE_OF_NAME = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names}

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
    if name not in _MODULE_OF_NAME:
        return importlib.import_module("ejkernel.compat.paths").resolve_old_name(__name__, name)
    return getattr(importlib.import_module(_MODULE_OF_NAME[name]), name)
