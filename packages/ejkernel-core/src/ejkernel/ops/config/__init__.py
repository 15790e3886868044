"""Configurations: their types, the tiers that choose them, and where they are stored."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ejkernel.errors import NoConfigError
    from ejkernel.ops.config.chain import ConfigSelectorChain, Request, Selection
    from ejkernel.ops.config.key import ConfigKey
    from ejkernel.ops.config.memory import ConfigCache
    from ejkernel.ops.config.overlay import overlay_cache
    from ejkernel.ops.config.persistent import PersistentCache, StoreWarning
    from ejkernel.ops.config.policy import AutotunePolicy, forward_autotune_only, policy_override
    from ejkernel.ops.params import BaseOperationConfig, BwdParams, FwdParams

_EXPORTED_NAMES_BY_MODULE = {
    "ejkernel.errors": ("NoConfigError",),
    "ejkernel.ops.config.chain": ("ConfigSelectorChain", "Request", "Selection"),
    "ejkernel.ops.config.key": ("ConfigKey",),
    "ejkernel.ops.config.memory": ("ConfigCache",),
    "ejkernel.ops.config.overlay": ("overlay_cache",),
    "ejkernel.ops.params": ("BaseOperationConfig", "BwdParams", "FwdParams"),
    "ejkernel.ops.config.persistent": ("PersistentCache", "StoreWarning"),
    "ejkernel.ops.config.policy": ("AutotunePolicy", "forward_autotune_only", "policy_override"),
}
_MODULE_BY_EXPORTED_NAME = {name: module for module, names in _EXPORTED_NAMES_BY_MODULE.items() for name in names}

__all__ = [
    "AutotunePolicy",
    "BaseOperationConfig",
    "BwdParams",
    "ConfigCache",
    "ConfigKey",
    "ConfigSelectorChain",
    "FwdParams",
    "NoConfigError",
    "PersistentCache",
    "Request",
    "Selection",
    "StoreWarning",
    "forward_autotune_only",
    "overlay_cache",
    "policy_override",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_BY_EXPORTED_NAME:
        return importlib.import_module("ejkernel.compat.paths").resolve_old_name(__name__, name)
    return getattr(importlib.import_module(_MODULE_BY_EXPORTED_NAME[name]), name)
