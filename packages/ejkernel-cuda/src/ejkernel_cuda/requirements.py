"""The requirements on device, library and dtypes that all decode attention kernels share."""

from collections.abc import Callable, Iterable
from typing import Any

from ejkernel.ops import Requires
from ejkernel_cuda import library


def decode_requires(*, handles: Iterable[str], extra: Callable[[Any], Iterable[str]]) -> Requires:
    """Returns the requirements: NVIDIA GPUs from Ampere on, queries of 16 bits, and the compiled library.

    Args:
        handles: Optional fields that the kernels honour.
        extra: Yields reasons that the other requirements cannot express.
    """
    return Requires(
        devices=frozenset({"nvidia"}),
        modules=(library.COMPILED_MODULE,),
        min_compute_capability=8.0,
        dtypes=frozenset({"float16", "bfloat16"}),
        head_dims=range(8, 257),
        handles=frozenset(handles),
        extra=extra,
    )
