"""The selective scan (Mamba-1) in Triton, for GPUs from Ampere on and AMD's through HIP."""

from collections.abc import Iterable
from typing import Any

from ejkernel.ops import ConfigSpace, Implementation
from ejkernel.planning import scan_sequences
from ejkernel_triton.requirements import triton_implementation, triton_requires
from ejkernel_triton.selective_scan import config

GRADIENTS = frozenset({"x", "step", "decay", "write", "read", "skip", "initial_state"})
DTYPES = ("float16", "bfloat16", "float32")
LARGEST = 32
"""Numbers of a state that registers hold."""


def _reasons(record: Any) -> Iterable[str]:
    """What `Requires` has no word for."""
    arrays = (record.x, record.decay, record.initial_state)
    if not all(array.size for array in arrays if array is not None):
        yield "an array is empty"
    if str(record.step.dtype) not in DTYPES:
        yield f"dt of {record.step.dtype} is not among {', '.join(DTYPES)}"


def implementations() -> tuple[Implementation, ...]:
    """One implementation; for the CPU too where Triton's interpreter is switched on."""
    return (
        triton_implementation(
            "selective_scan",
            forward="selective_scan.forward:forward",
            backward="selective_scan.backward:backward",
            gradients=GRADIENTS,
            requires=triton_requires(
                head_dims=range(1, LARGEST + 1), handles=scan_sequences.HANDLES | {"initial_state"}, extra=_reasons
            ),
            config=ConfigSpace(
                forward=config.ScanForward,
                backward=config.ScanBackward,
                faces=config.FACES,
                heuristic=scan_sequences.of_rows(config.heuristic),
                candidates=scan_sequences.of_rows(config.candidates),
            ),
        ),
    )
