"""The quantised matmul of few rows in CUDA C++, as in decoding, where reading the weights is the bottleneck."""

from collections.abc import Iterable
from typing import Any

from ejkernel.families.quantized_matmul import columns
from ejkernel.ops import ConfigSpace, Implementation, Requires
from ejkernel.ops.device import DeviceInfo, current_device
from ejkernel.ops.params import Direction
from ejkernel_cuda import library
from ejkernel_cuda.quantized_matmul import config

MAX_ROWS = 64
"""The largest number of rows of x for which the weights, and not the products, are the bottleneck."""
MIN_GROUP_SIZE = 64
"""The smallest group of codes. With `transpose` the scale is applied to a group's sums; without, a group must be
exactly a warp's columns.
"""
MAX_ELEMENTS = 2**31 - 1
"""The largest number of elements of an array: indices of rows and tiles have 32 bits."""
MIN_PRIORITY_COLUMNS = 4096
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
        yield f"{quantized_format.mode} codes of {quantized_format.bits} bits: the kernels multiply affine ones of 4"
    if record.scales.dtype.name != "float16":
        yield f"scales are {record.scales.dtype}: the kernels read float16"
    if rows > MAX_ROWS:
        yield f"x has {rows} rows, more than {MAX_ROWS}"
    if record.packed.size > MAX_ELEMENTS:
        yield f"w has {record.packed.size} words, more than {MAX_ELEMENTS}"
    if k % 8:
        yield f"rows of {k} elements of x are not multiples of 16 bytes"
    yield from _layout_refusal_reasons(record)


def _layout_refusal_reasons(record: Any) -> Iterable[str]:
    """Yields the reasons why the kernel for the record's layout cannot serve it."""
    group, (rows, groups) = record.format.group_size, record.scales.shape
    if group < MIN_GROUP_SIZE:
        yield f"groups of {group} are smaller than {MIN_GROUP_SIZE}"
    if record.transpose:
        if rows % 4:
            yield f"{rows} columns are not a multiple of 4"
        return
    if group > MIN_GROUP_SIZE:
        yield f"groups of {group}: without transpose, groups have {MIN_GROUP_SIZE}"
    if groups % 2:
        yield f"rows of {groups} scales are not multiples of 4 bytes"


def _priority(record: Any, device: DeviceInfo, direction: Direction) -> int:
    """Returns a priority above Triton's 10, except for few columns without transpose
    (docs/lab/quantized_matmul_gpu.md).
    """
    return 5 if not record.transpose and columns(record) < MIN_PRIORITY_COLUMNS else 20


IMPLEMENTATIONS = (
    Implementation(
        family="quantized_matmul",
        name="cuda",
        platform="cuda",
        forward="ejkernel_cuda.quantized_matmul.forward:forward",
        requires=Requires(
            devices=frozenset({"nvidia"}),
            modules=(library.COMPILED_MODULE,),
            min_compute_capability=9.0,
            dtypes=frozenset({"bfloat16"}),
            handles=frozenset({"zeros", "transpose", "precision"}),
            extra=_refusal_reasons,
        ),
        config=ConfigSpace(
            heuristic=config.heuristic,
            candidates=config.candidates,
            forward=config.QuantizedSplits,
            public_fields=config.PUBLIC_FIELDS,
        ),
        priority=_priority,
        cases="ejkernel_cuda.quantized_matmul.cases:cases",
    ),
)
