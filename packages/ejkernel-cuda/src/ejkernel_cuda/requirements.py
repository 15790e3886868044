"""The requirements that the registrations of all compiled kernels share: device, library and dtypes."""

from collections.abc import Callable, Iterable
from typing import Any

from ejkernel.ops import Requires
from ejkernel_cuda import library


def cuda_requires(
    min_compute_capability: float,
    dtypes: Iterable[str],
    *,
    handles: Iterable[str],
    extra_reasons: Callable[[Any], Iterable[str]],
    head_dims: range | None = None,
) -> Requires:
    """Returns the requirements of a kernel: an NVIDIA GPU and the compiled library.

    Args:
        min_compute_capability: Of the GPU.
        dtypes: Dtypes that the kernel reads.
        handles: Optional fields that the kernel honours.
        extra_reasons: Yields reasons that the other requirements cannot express.
        head_dims: Head dimensions that the kernel supports; None for kernels without.
    """
    return Requires(
        devices=frozenset({"nvidia"}),
        modules=(library.COMPILED_MODULE,),
        min_compute_capability=min_compute_capability,
        dtypes=frozenset(dtypes),
        head_dims=head_dims,
        handles=frozenset(handles),
        extra=extra_reasons,
    )


def decode_requires(*, handles: Iterable[str], extra_reasons: Callable[[Any], Iterable[str]]) -> Requires:
    """Returns the requirements of decode attention: GPUs from Ampere on, and queries of 16 bits.

    Args:
        handles: Optional fields that the kernels honour.
        extra_reasons: Yields reasons that the other requirements cannot express.
    """
    return cuda_requires(
        8.0, ("float16", "bfloat16"), handles=handles, extra_reasons=extra_reasons, head_dims=range(8, 257)
    )
