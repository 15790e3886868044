"""The quantised matmul of few rows in CUDA C++: decoding, where reading the weights takes the time."""

from collections.abc import Iterable
from typing import Any

from ejkernel.families.quantized_matmul import columns
from ejkernel.ops import ConfigSpace, Implementation, Requires
from ejkernel.ops.device import current_device
from ejkernel_cuda import library
from ejkernel_cuda.quantized_matmul import tiles

MOST_ROWS = 64
"""Rows of x that a block holds."""
SMALLEST_GROUP = 32
"""Codes of a group at least: 16 bytes of codes of 4 bits, which a thread reads at a time, share their scale."""


def _reasons(record: Any) -> Iterable[str]:
    """What `Requires` has no word for."""
    form, words = record.format, record.packed.shape[1]
    if not (record.x.size and record.packed.size):
        yield "an array is empty"
        return
    if form.bits not in (4, 8):
        yield f"bits {form.bits}: the kernels unpack codes of 4 and 8"
        return
    if form.group_size < SMALLEST_GROUP:
        yield f"groups of {form.group_size} are smaller than {SMALLEST_GROUP}"
    if record.x.shape[0] > MOST_ROWS:
        yield f"x has {record.x.shape[0]} rows, more than {MOST_ROWS}"
    if words % 4:
        yield f"rows of {words} words of w are not multiples of 16 bytes"
    if record.scales.shape[1] * tiles.scale_bytes(record) % 4:
        yield f"rows of {record.scales.shape[1]} scales are not multiples of 4 bytes"
    if columns(record) % 4:
        yield f"{columns(record)} columns are not a multiple of 4"
    if not tiles.candidates(record, current_device(), "forward"):
        yield f"{record.x.shape[0]} rows of x do not fit into this chip's shared memory beside the words"
    if record.x.shape[1] % 8:
        yield f"rows of {record.x.shape[1]} numbers of x are not multiples of 16 bytes"


IMPLEMENTATIONS = (
    Implementation(
        family="quantized_matmul",
        name="cuda",
        platform="cuda",
        backend="gpu",
        forward="ejkernel_cuda.quantized_matmul.forward:forward",
        requires=Requires(
            devices=frozenset({"nvidia"}),
            modules=(library.MODULE,),
            min_compute_capability=8.0,
            dtypes=frozenset({"float16", "bfloat16"}),
            handles=frozenset({"zeros", "transpose", "precision"}),
            extra=_reasons,
        ),
        config=ConfigSpace(
            heuristic=tiles.heuristic,
            candidates=tiles.candidates,
            forward=tiles.QuantizedTiles,
            faces=tiles.FACES,
        ),
        # Behind XLA, so only where `platform=` asks: an earlier version was as fast as Triton's kernels on an H200, and
        # this one has not been timed (docs/lab/quantized_matmul_gpu.md).
        priority=-10,
        cases="ejkernel_cuda.quantized_matmul.cases:cases",
    ),
)
