"""Configurations: their types, the tiers that choose them, and where they are stored."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ejkernel.errors import NoConfigError
    from ejkernel.ops.config.chain import ConfigSelectorChain, Request, Selection
    from ejkernel.ops.config.key import ConfigKey
    from ejkernel.ops.config.memory import ConfigCache
    from ejkernel.ops.config.overlay import overlay_cache
    from ejkernel.ops.config.params import BaseOperationConfig, BwdParams, FwdParams
    from ejkernel.ops.config.persistent import PersistentCache, StoreWarning
    from ejkernel.ops.config.policy import AutotunePolicy, forward_autotune_only, policy_override

_HOMES = {
    "chain": ("ConfigSelectorChain", "NoConfigError", "Request", "Selection"),
    "key": ("ConfigKey",),
    "memory": ("ConfigCache",),
    "overlay": ("overlay_cache",),
    "params": ("BaseOperationConfig", "BwdParams", "FwdParams"),
    "persistent": ("PersistentCache", "StoreWarning"),
    "policy": ("AutotunePolicy", "forward_autotune_only", "policy_override"),
}
_MODULES = {name: module for module, names in _HOMES.items() for name in names}

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
    if name not in _MODULES:
        return importlib.import_module("ejkernel.compat.paths").old_name(__name__, name)
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
