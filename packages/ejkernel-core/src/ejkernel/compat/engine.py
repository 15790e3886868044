"""Names of `ejkernel.ops.core`, `.registry`, `.utils`, `.config.cache`, `.config.selection` and `.execution.tuning`.

Most are those of `ejkernel.ops`. One module answers to all of these paths.
"""

from collections.abc import Callable
from typing import Any

import jax
import msgspec

from ejkernel.ops import (
    AutotunePolicy,
    BwdParams,
    ConfigCache,
    ConfigSelectorChain,
    Executor,
    FwdParams,
    Invocation,
    Kernel,
    Measurement,
    PersistentCache,
    Tuner,
    autotune_recorded,
    device_fingerprint,
    device_kind,
    forward_autotune_only,
    get_device_platform,
    get_invocations,
    overlay_cache,
    policy_override,
    record_invocation,
    short_hash,
    stable_json,
    vmap_with_config,
)
from ejkernel.ops.execution.custom_kernel import overrides_method
from ejkernel.ops.execution.kernel import Cfg, Out

__all__ = [
    "AutotunePolicy",
    "BwdParams",
    "Cfg",
    "ConfigCache",
    "ConfigSelectorChain",
    "Executor",
    "FwdParams",
    "Invocation",
    "Kernel",
    "Measurement",
    "Out",
    "PersistentCache",
    "Tuner",
    "abstractify",
    "autotune_recorded",
    "benchmark",
    "default_key_builder_with_sharding",
    "device_fingerprint",
    "device_kind",
    "forward_autotune_only",
    "from_json",
    "get_device_platform",
    "get_invocations",
    "overlay_cache",
    "policy_override",
    "record_invocation",
    "sharding_fingerprint",
    "short_hash",
    "stable_json",
    "to_json",
    "vmap_with_config",
]

# Modules are imported below some of this module's old names, which therefore have to be packages.
__path__: list[str] = []


def abstractify(pytree: Any) -> Any:
    """Returns the same tree with shapes and dtypes in the place of arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if hasattr(x, "shape") else x, pytree)


def sharding_fingerprint(x: Any) -> str:
    """Returns how an array is sharded, as text; empty where it does not say."""
    return str(getattr(x, "sharding", None) or "")


def default_key_builder_with_sharding(inv: Invocation) -> str:
    """Returns a key of a call that also holds how its arrays are sharded."""
    leaves = jax.tree.leaves((inv.args, inv.kwargs))
    return short_hash(f"{inv.op_id} {abstractify(leaves)} {[sharding_fingerprint(leaf) for leaf in leaves]}")


def benchmark(fn: Callable[..., Any], *args: Any, warmup: int = 1, iters: int = 5, **kwargs: Any) -> float:
    """Returns median seconds of a call on the device."""
    return Tuner(warmup, iters).measure(fn, *args, **kwargs)


def to_json(obj: Any) -> str:
    """Returns JSON text of a dataclass or of plain values."""
    return msgspec.json.encode(obj).decode()


def from_json(s: str) -> Any:
    """Returns the plain values of JSON text; a configuration class has a `from_json` of its own."""
    return msgspec.json.decode(s)


def platform_method(
    k: Kernel[Any, Any], method_name: str, platform: str | None = None, context: str | None = None
) -> Callable[..., Any] | None:
    """Returns the kernel's method of this name that is most specific; None if its class defines none."""
    names = [f"{method_name}_{context}_{platform}", f"{method_name}_{context}"] if context else []
    names += [f"{method_name}_{platform}", method_name]
    return next((getattr(k, name) for name in names if overrides_method(k, name)), None)


def has_custom_vjp(k: Kernel[Any, Any], platform: str | None = None, context: str | None = None) -> bool:
    """Returns whether a kernel brings its own gradient."""
    return all(platform_method(k, name, platform, context) for name in ("fwd_with_residuals", "vjp"))


# The names under which they are imported.
_get_platform_method = platform_method
_has_custom_vjp = has_custom_vjp
