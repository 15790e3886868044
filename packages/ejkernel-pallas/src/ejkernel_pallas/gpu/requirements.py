"""The requirements of all Mosaic GPU kernels on device, toolchain and dtypes."""

from collections.abc import Callable, Iterable
from typing import Any

from ejkernel.ops import Requires
from ejkernel.ops.device import current_device
from ejkernel_pallas.toolchain import JAX


def hopper_requires(
    *,
    handles: Iterable[str],
    find_refusal_reasons: Callable[[Any], Iterable[str]],
    head_dims: tuple[int, ...] | None = None,
    dtypes: Iterable[str] = ("float16", "bfloat16"),
) -> Requires:
    """Returns the requirements: NVIDIA GPUs of compute capability 9.0, and 16-bit dtypes by default.

    Args:
        handles: Optional fields that the kernels honour.
        find_refusal_reasons: Yields reasons that the other requirements cannot express.
        head_dims: Head dimensions that the kernels support; None for families without, or if `find_refusal_reasons`
            checks them.
        dtypes: Dtypes of the first operand.
    """

    def refusal_reasons(record: Any) -> Iterable[str]:
        capability = current_device().compute_capability
        if capability is not None and capability >= 10.0:
            yield f"the GPU has compute capability {capability}; the kernel uses instructions that only 9.0 has"
        yield from find_refusal_reasons(record)

    return Requires(
        devices=frozenset({"nvidia"}),
        modules=JAX,
        min_compute_capability=9.0,
        dtypes=frozenset(dtypes),
        head_dims=head_dims,
        handles=frozenset(handles),
        extra=refusal_reasons,
    )
