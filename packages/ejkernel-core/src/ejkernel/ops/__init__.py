"""The engine: how operations are declared, chosen, configured, differentiated and run."""

import importlib
import sys
from types import ModuleType
from typing import Any

from ejkernel.errors import NoConfigError, NoImplementationError, TunerError
from ejkernel.families.contract import Family
from ejkernel.ops.argument_records import ArgumentRecord
from ejkernel.ops.batch_invariance import batch_invariant
from ejkernel.ops.call import call, default_chain
from ejkernel.ops.calls_file import read_calls, save_recorded
from ejkernel.ops.config.chain import ConfigSelectorChain, Request, Selection
from ejkernel.ops.config.key import ConfigKey
from ejkernel.ops.config.measurement import Measurement, TuningResult
from ejkernel.ops.config.memory import ConfigCache
from ejkernel.ops.config.overlay import overlay_cache
from ejkernel.ops.config.persistent import PersistentCache, StoreWarning
from ejkernel.ops.config.policy import AutotunePolicy, forward_autotune_only, policy_override
from ejkernel.ops.config.tuner import Tuner
from ejkernel.ops.device import DeviceInfo, current_device, target_device
from ejkernel.ops.dispatch import Choice, Decision, Verdict
from ejkernel.ops.execution.batching import vmap_with_config
from ejkernel.ops.execution.executor import Executor, create_default_executor
from ejkernel.ops.execution.kernel import Invocation, Kernel
from ejkernel.ops.execution.offline import autotune_recorded, tune_abstract
from ejkernel.ops.explain import explain
from ejkernel.ops.fingerprint import (
    device_fingerprint,
    device_kind,
    get_device_platform,
    short_hash,
    stable_json,
)
from ejkernel.ops.invocations import get_invocations, record_invocation
from ejkernel.ops.isolation import isolate_sequences
from ejkernel.ops.model import Case, Implementation, Op, Requires, Tolerance, tolerances
from ejkernel.ops.operation import document_options, run_operation
from ejkernel.ops.params import BaseOperationConfig, BwdParams, FwdParams
from ejkernel.ops.plugins import hookimpl, registry
from ejkernel.ops.recording import clear_recorded, get_recorded, record_calls
from ejkernel.ops.second import second_derivatives
from ejkernel.ops.space import NO_CHOICE, ConfigSpace
from ejkernel.ops.values import Condition, check_values
from ejkernel.types.arguments import arguments, static
from ejkernel.types.forward_mode import forward_mode
from ejkernel.types.pullback import Pullback

__all__ = [
    "NO_CHOICE",
    "ArgumentRecord",
    "AutotunePolicy",
    "BaseOperationConfig",
    "BwdParams",
    "Case",
    "Choice",
    "Condition",
    "ConfigCache",
    "ConfigKey",
    "ConfigSelectorChain",
    "ConfigSpace",
    "Decision",
    "DeviceInfo",
    "Executor",
    "Family",
    "FwdParams",
    "Implementation",
    "Invocation",
    "Kernel",
    "Measurement",
    "NoConfigError",
    "NoImplementationError",
    "Op",
    "PersistentCache",
    "Pullback",
    "Request",
    "Requires",
    "Selection",
    "StoreWarning",
    "Tolerance",
    "Tuner",
    "TunerError",
    "TuningResult",
    "Verdict",
    "arguments",
    "autotune_recorded",
    "batch_invariant",
    "call",
    "check_values",
    "clear_recorded",
    "create_default_executor",
    "current_device",
    "default_chain",
    "device_fingerprint",
    "device_kind",
    "document_options",
    "explain",
    "forward_autotune_only",
    "forward_mode",
    "get_device_platform",
    "get_invocations",
    "get_recorded",
    "hookimpl",
    "isolate_sequences",
    "overlay_cache",
    "policy_override",
    "read_calls",
    "record_calls",
    "record_invocation",
    "registry",
    "run_operation",
    "save_recorded",
    "second_derivatives",
    "short_hash",
    "stable_json",
    "static",
    "target_device",
    "tolerances",
    "tune_abstract",
    "vmap_with_config",
]


class _EngineModule(ModuleType):
    """The class of this package. Importing a submodule binds its name in the package; this class keeps the function
    `registry`, whose name is also that of a module of the earlier library.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if not (isinstance(value, ModuleType) and name in __all__):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _EngineModule


def __getattr__(name: str) -> Any:
    return importlib.import_module("ejkernel.compat.paths").resolve_old_name(__name__, name)
