"""What all implementations in Triton have in common, and need of device, toolchain and dtypes."""

from collections.abc import Callable, Iterable
from typing import Any

from ejkernel.ops import ConfigSpace, Implementation, Requires
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.params import Direction
from ejkernel_triton.launch import interpreting

JAX_TRITON = ("triton", "jax_triton>=0.3.1,<0.5", "jax>=0.10,<0.13")
"""The toolchain on devices. jax-triton reaches into JAX, so versions of both that are not tested are refused."""

DTYPES = frozenset({"float16", "bfloat16", "float32"})


def triton_requires(
    *, handles: Iterable[str], extra: Callable[[Any], Iterable[str]], head_dims: range | None = None
) -> Requires:
    """GPUs from Ampere on and AMD's; the CPU too where Triton's interpreter is switched on, which needs no jax-triton.

    Args:
        handles: Optional fields that the kernels honour.
        extra: Sentences for what data cannot say.
        head_dims: Head dimensions that the kernels have; None for families without.
    """
    interpreted = interpreting()
    return Requires(
        devices=frozenset({"nvidia", "amd"}) | ({"cpu"} if interpreted else frozenset()),
        modules=("triton",) if interpreted else JAX_TRITON,
        min_compute_capability=8.0,
        dtypes=DTYPES,
        head_dims=head_dims,
        handles=frozenset(handles),
        extra=extra,
    )


def triton_implementation(
    family: str,
    *,
    requires: Requires,
    config: ConfigSpace,
    forward: str,
    backward: str | None = None,
    name: str = "triton",
    priority: int | Callable[[Any, DeviceInfo, Direction], int] = 10,
    **fields: Any,
) -> Implementation:
    """Returns an implementation in Triton.

    Args:
        family: The family it serves.
        requires: What it needs and honours.
        config: What can be chosen.
        forward: "folder.module:function" below this package.
        backward: The backward pass in the same form; None without one.
        name: Name among the implementations of the family.
        priority: Its place among those that a GPU has confirmed; XLA's is 0.
        **fields: Others of `Implementation`.
    """
    return Implementation(
        family=family,
        name=name,
        platform="triton",
        forward=f"ejkernel_triton.{forward}",
        backward=None if backward is None else f"ejkernel_triton.{backward}",
        requires=requires,
        config=config,
        priority=priority,
        **fields,
    )
