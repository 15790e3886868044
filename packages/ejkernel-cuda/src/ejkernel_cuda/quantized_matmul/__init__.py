"""The quantised matmul of few rows in CUDA C++, as in decoding, where reading the weights is the bottleneck."""

from collections.abc import Iterable
from typing import Any

from ejkernel.families.quantized_matmul import columns
from ejkernel.ops import ConfigSpace, Implementation
from ejkernel.ops.device import DeviceInfo, current_device
from ejkernel.ops.params import Direction
from ejkernel_cuda.quantized_matmul import config
from ejkernel_cuda.requirements import cuda_requires

MAX_ROWS = 64
"""The largest number of rows of x for which the weights, and not the products, are the bottleneck."""
MIN_GROUP_SIZE = 64
"""The smallest group of codes. With `transpose` the scale is applied to a group's sums; without, a group must be
exactly a warp's columns.
"""
MAX_ARRAY_ELEMENTS = 2**31 - 1
"""The largest number of elements of an array: indices of rows and tiles have 32 bits."""
MIN_COLUMNS_FOR_PRIORITY = 4096
"""With `transpose=False`, the smallest number of columns for which the kernels have priority over Triton's. Smaller
matrices have not been timed, and leave multiprocessors without a block.
"""


def _refusal_reasons(record: Any) -> Iterable[str]:
    """Yields the reasons to refuse a record that `Requires` cannot express."""
    quantized_format, (rows, k) = record.format, record.x.shape
    capability = current_device().compute_capability
    if capability is not None and capability >= 10.0:
        yield f"compute capability {capability}: the kernels are compiled for 9.0 alone"
    if quantized_format.mode != "affine" or quantized_format.bits != 4:
        codes = f"{quantized_format.mode} codes of {quantized_format.bits} bits"
        yield f"mode: got {codes}, the kernels multiply affine codes of 4 bits"
    if record.scales.dtype.name != "float16":
        yield f"scales: got {record.scales.dtype}, the kernels read float16"
    if rows > MAX_ROWS:
        yield f"x: got {rows} rows, the kernels have at most {MAX_ROWS}"
    if record.packed.size > MAX_ARRAY_ELEMENTS:
        yield f"w: got {record.packed.size} words, the kernels have at most {MAX_ARRAY_ELEMENTS}"
    if k % 8:
        yield f"x: got rows of {k} elements, the kernels read multiples of 16 bytes"
    yield from _layout_refusal_reasons(record)


def _layout_refusal_reasons(record: Any) -> Iterable[str]:
    """Yields the reasons why the kernel for the record's layout cannot serve it."""
    group, (rows, groups) = record.format.group_size, record.scales.shape
    if group < MIN_GROUP_SIZE:
        yield f"group_size: got {group}, the kernels have at least {MIN_GROUP_SIZE}"
    if record.transpose:
        if rows % 4:
            yield f"w: got {rows} columns, the kernels have a multiple of 4"
        return
    if group > MIN_GROUP_SIZE:
        yield f"group_size: got {group}, without transpose the kernels have {MIN_GROUP_SIZE}"
    if groups % 2:
        yield f"scales: got rows of {groups}, the kernels read multiples of 4 bytes"


def _priority(record: Any, device: DeviceInfo, direction: Direction) -> int:
    """Returns a priority above Triton's 10, except for few columns without transpose
    (docs/lab/quantized_matmul_gpu.md).
    """
    return 5 if not record.transpose and columns(record) < MIN_COLUMNS_FOR_PRIORITY else 20


IMPLEMENTATIONS = (
    Implementation(
        family="quantized_matmul",
        name="cuda",
        platform="cuda",
        forward="ejkernel_cuda.quantized_matmul.forward:forward",
        requires=cuda_requires(
            9.0, {"bfloat16"}, handles={"zeros", "transpose", "precision"}, extra_reasons=_refusal_reasons
        ),
        config=ConfigSpace.of(config, forward=config.QuantizedSplits),
        priority=_priority,
        cases="ejkernel_cuda.quantized_matmul.cases:cases",
    ),
)
