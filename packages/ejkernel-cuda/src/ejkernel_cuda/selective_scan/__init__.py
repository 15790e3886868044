"""The forward selective scan (Mamba-1) in CUDA C++: states in registers, B and C in shared memory."""

from collections.abc import Iterable
from typing import Any

from ejkernel.ops import ConfigSpace, Implementation, Requires
from ejkernel_cuda import library
from ejkernel_cuda.selective_scan import tiles

DTYPES = ("float16", "bfloat16", "float32")


def _reasons(record: Any) -> Iterable[str]:
    """What `Requires` has no word for."""
    arrays = (record.x, record.decay, record.initial_state)
    if not all(array.size for array in arrays if array is not None):
        yield "an array is empty"
    if str(record.step.dtype) not in DTYPES:
        yield f"dt of {record.step.dtype} is not among {', '.join(DTYPES)}"


IMPLEMENTATIONS = (
    Implementation(
        family="selective_scan",
        name="cuda",
        platform="cuda",
        backend="gpu",
        forward="ejkernel_cuda.selective_scan.forward:forward",
        requires=Requires(
            devices=frozenset({"nvidia"}),
            modules=(library.MODULE,),
            min_compute_capability=8.0,
            dtypes=frozenset(DTYPES),
            head_dims=range(1, tiles.LARGEST + 1),
            handles=frozenset({"initial_state"}),
            extra=_reasons,
        ),
        config=ConfigSpace(heuristic=tiles.heuristic, candidates=tiles.candidates, forward=tiles.ScanTile),
        # Below Triton's 10 until a chip has confirmed it.
        priority=5,
    ),
)
