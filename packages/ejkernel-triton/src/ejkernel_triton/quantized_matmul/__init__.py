"""The quantised matmul in Triton, for GPUs from Ampere on and AMD's through HIP."""

from collections.abc import Iterable
from typing import Any

from ejkernel.ops import ConfigSpace, Implementation
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.params import Direction
from ejkernel_triton.quantized_matmul import config, ordered
from ejkernel_triton.requirements import triton_implementation, triton_requires

HANDLES = ("zeros", "tensor_scale", "transpose", "precision")
"""Optional fields that the kernels honour."""
MAX_ROWS = 256
"""Rows of x above which dequantising the matrix once is faster than dequantising it for every tile."""
MAX_MATRIX_WORDS = 2**31 - 1
"""The largest number of words of a matrix: offsets in it have 32 bits."""


def _refusal_reasons(record: Any) -> Iterable[str]:
    """Yields the reasons to refuse a record that `Requires` cannot express."""
    if record.format.bits not in (4, 8):
        yield f"bits {record.format.bits}: the kernels unpack codes of 4 and 8"
    if record.packed.size > MAX_MATRIX_WORDS:
        yield f"w has {record.packed.size} words, more than {MAX_MATRIX_WORDS}"


def _priority(record: Any, device: DeviceInfo, direction: Direction) -> int:
    """Returns a priority above XLA's, which dequantises once, for as many rows as that takes longer for."""
    return 10 if record.x.shape[0] <= MAX_ROWS else -1


def implementations() -> tuple[Implementation, ...]:
    """Returns the implementations, which also serve CPUs if Triton's interpreter is enabled."""
    return (
        triton_implementation(
            "quantized_matmul",
            forward="quantized_matmul.forward:forward",
            backward="quantized_matmul.backward:backward",
            gradients=frozenset({"x"}),
            priority=_priority,
            requires=triton_requires(handles=HANDLES, extra_reasons=_refusal_reasons),
            config=ConfigSpace.of(config, forward=config.QuantizedTiles),
            invariant_to=frozenset({"batch"}),
            invariant_priority=10,
        ),
        *ordered.implementations(HANDLES, _refusal_reasons),
    )
