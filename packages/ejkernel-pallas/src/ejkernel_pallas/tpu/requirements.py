"""What all kernels in Mosaic TPU need of device, toolchain and dtypes."""

from collections.abc import Callable, Iterable
from typing import Any

from ejkernel.ops import Requires
from ejkernel_pallas.toolchain import JAX
from ejkernel_pallas.tpu.interpret import devices

DTYPES = frozenset({"bfloat16", "float32"})


def tpu_requires(
    *, handles: Iterable[str], extra: Callable[[Any], Iterable[str]] = lambda record: (), head_dims: range | None = None
) -> Requires:
    """Returns TPUs; the CPU too where kernels are interpreted.

    Args:
        handles: Optional fields that the kernels honour.
        extra: Sentences for what data cannot say.
        head_dims: Head dimensions that the kernels have; None for families without.
    """
    return Requires(
        devices=devices(),
        modules=JAX,
        dtypes=DTYPES,
        head_dims=head_dims,
        handles=frozenset(handles),
        extra=extra,
    )
