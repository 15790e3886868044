"""The requirements that all Mosaic TPU kernels have of device, toolchain and dtypes."""

from collections.abc import Callable, Iterable
from typing import Any

from ejkernel.ops import Requires
from ejkernel_pallas.toolchain import JAX
from ejkernel_pallas.tpu.interpret import devices

DTYPES = frozenset({"bfloat16", "float32"})


def tpu_requires(
    *, handles: Iterable[str], extra: Callable[[Any], Iterable[str]] = lambda record: (), head_dims: range | None = None
) -> Requires:
    """Returns requirements that are met by TPUs, and by the CPU where kernels are interpreted.

    Args:
        handles: Optional fields that the kernels support.
        extra: Yields reasons to refuse a record that data cannot express.
        head_dims: Head dimensions that the kernels support; None for operations without heads.
    """
    return Requires(
        devices=devices(),
        modules=JAX,
        dtypes=DTYPES,
        head_dims=head_dims,
        handles=frozenset(handles),
        extra=extra,
    )
