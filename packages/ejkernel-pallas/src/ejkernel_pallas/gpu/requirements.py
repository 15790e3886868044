"""What all kernels in Mosaic GPU need of device, toolchain and dtypes."""

from collections.abc import Callable, Iterable
from typing import Any

from ejkernel.ops import Requires
from ejkernel.ops.device import current_device
from ejkernel_pallas.toolchain import JAX


def hopper_requires(
    *,
    handles: Iterable[str],
    extra: Callable[[Any], Iterable[str]],
    head_dims: tuple[int, ...] | None = None,
    dtypes: Iterable[str] = ("float16", "bfloat16"),
) -> Requires:
    """Returns NVIDIA's GPUs of compute capability 9.0, and 16-bit dtypes unless others are named.

    Args:
        handles: Optional fields that the kernels honour.
        extra: Sentences for what data cannot say.
        head_dims: Head dimensions that the kernels have; None for what has none, or whose `extra` refuses them.
        dtypes: Of the first operand.
    """

    def reasons(record: Any) -> Iterable[str]:
        capability = current_device().compute_capability
        if capability is not None and capability >= 10.0:
            yield f"compute capability {capability}: the kernels are made of instructions of 9.0 alone"
        yield from extra(record)

    return Requires(
        devices=frozenset({"nvidia"}),
        modules=JAX,
        min_compute_capability=9.0,
        dtypes=frozenset(dtypes),
        head_dims=head_dims,
        handles=frozenset(handles),
        extra=reasons,
    )
