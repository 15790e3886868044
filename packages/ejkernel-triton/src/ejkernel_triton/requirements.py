"""The common parts of all Triton implementations: requirements on device, toolchain and dtypes."""

from collections.abc import Callable, Iterable
from typing import Any

from ejkernel.ops import ConfigSpace, Implementation, Requires
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.params import Direction
from ejkernel_triton.launch import is_interpreting

DEVICE_TOOLCHAIN = ("triton", "jax_triton>=0.3.1,<0.5", "jax>=0.10,<0.13")
"""The toolchain on devices. jax-triton uses JAX's internals, so versions of both that are not tested are refused."""

DTYPES = frozenset({"float16", "bfloat16", "float32"})


def triton_requires(
    *,
    handles: Iterable[str],
    extra_reasons: Callable[[Any], Iterable[str]] = lambda record: (),
    head_dims: range | None = None,
) -> Requires:
    """Returns the requirements: GPUs from Ampere on and AMD's, or CPUs if Triton's interpreter is enabled.

    Args:
        handles: Optional fields that the kernels honour.
        extra_reasons: Yields reasons that the other requirements cannot express.
        head_dims: Head dimensions that the kernels support; None for families without.
    """
    uses_interpreter = is_interpreting()
    return Requires(
        devices=frozenset({"nvidia", "amd"}) | ({"cpu"} if uses_interpreter else frozenset()),
        modules=("triton",) if uses_interpreter else DEVICE_TOOLCHAIN,
        min_compute_capability=8.0,
        dtypes=DTYPES,
        head_dims=head_dims,
        handles=frozenset(handles),
        extra=extra_reasons,
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
    **other_fields: Any,
) -> Implementation:
    """Returns a Triton implementation.

    Args:
        family: The family that it implements.
        requires: Its requirements, and the fields that it honours.
        config: Its configuration space.
        forward: "folder.module:function" in this package.
        backward: The backward pass in the same form; None without one.
        name: Name among the implementations of the family.
        priority: Its place in the order of choice among implementations confirmed on a GPU; XLA's is 0.
        **other_fields: Others of `Implementation`.
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
        **other_fields,
    )
