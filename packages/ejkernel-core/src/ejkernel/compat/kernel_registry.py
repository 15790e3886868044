"""A view of the registered implementations, to read. `ejkernel.explain` says which of them a call would use, and why.

Implementations are registered by distributions, through the entry-point group `ejkernel`; nothing can be added here.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from ejkernel.ops.plugins import registry

__all__ = ["KernelSpec", "get", "list_algorithms", "list_implementations"]


@dataclasses.dataclass(frozen=True)
class KernelSpec:
    """One implementation of an operation.

    Attributes:
        platform: Toolchain.
        backend: Device kind.
        algorithm: Name of the operation.
        implementation: Name of the implementation.
        priority: Higher is tried first; None where it depends on the call.
    """

    platform: str
    backend: str
    algorithm: str
    implementation: str
    priority: int | None = 0


def list_algorithms() -> list[str]:
    """Returns the names of all operations."""
    return sorted(registry().ops)


def list_implementations(algorithm: str) -> list[KernelSpec]:
    """Returns the implementations of an operation, in the order in which they are tried.

    Raises:
        ValueError: There is no such operation.
    """
    name = registry().op(algorithm).name
    return [
        KernelSpec(i.platform, i.backend, name, i.name, i.constant_priority)
        for i in registry().implementations.get(name, ())
    ]


def get(algorithm: str, platform: str | None = None, backend: str | None = None) -> Callable[..., Any]:
    """Returns the public function of an operation, bound to a toolchain if one is named.

    Args:
        algorithm: Name of the operation.
        platform: Toolchain; None and `"auto"` leave it to dispatch.
        backend: Device kind that the toolchain must have an implementation for; None and `"any"` for no wish.

    Raises:
        ValueError: There is no such operation, or no implementation of it fits.
    """
    filters = {"platform": platform, "backend": backend}
    filters = {name: value for name, value in filters.items() if value not in (None, "auto", "any")}
    specs = list_implementations(algorithm)
    fits = [s for s in specs if all(getattr(s, name) in (value, "any") for name, value in filters.items())]
    if not fits:
        available = ", ".join(f"{s.platform}/{s.backend}" for s in specs)
        raise ValueError(
            f"algorithm: no implementation of {algorithm!r} fits {filters}; there are {available or 'none'}"
        )
    function = registry().op(algorithm).function
    return functools.partial(function, platform=str(platform)) if "platform" in filters else function
