"""The selective scan (Mamba-1) in Triton, for GPUs from Ampere on and AMD's through HIP."""

from collections.abc import Iterable
from typing import Any

from ejkernel.families.selective_scan import scan_sequences
from ejkernel.ops import ConfigSpace, Implementation
from ejkernel_triton.requirements import triton_implementation, triton_requires
from ejkernel_triton.selective_scan import config, step

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


STEP = 8
"""Most tokens a sequence of the decode step; of packed sequences, on average."""

LONGEST = 256
"""Most tokens of packed sequences beyond one each: one of them may have all, and they are worked on in order."""

WIDEST = 256
"""Most numbers of a channel's state that the decode step takes."""


def _step_reasons(record: Any) -> Iterable[str]:
    """What the decode step has against a record."""
    tokens = record.x.shape[1]
    sequences = 1 if record.cu_seqlens is None else record.cu_seqlens.shape[0] - 1
    if tokens > STEP * sequences:
        yield f"x: {tokens} tokens of {sequences} sequences are more than a step of {STEP} tokens a sequence has"
    if record.cu_seqlens is not None and tokens - sequences > LONGEST:
        longest = f"one of {sequences} packed sequences may have {tokens - sequences + 1}"
        yield f"x: {longest} of {tokens} tokens, which a step works on one after the other"
    yield from _reasons(record)


def implementations() -> tuple[Implementation, ...]:
    """The scan and its decode step; for the CPU too where Triton's interpreter is switched on."""
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
                heuristic=config.heuristic,
                candidates=config.candidates,
            ),
        ),
        triton_implementation(
            "selective_scan",
            name="triton_decode",
            forward="selective_scan.step:forward",
            requires=triton_requires(
                head_dims=range(1, WIDEST + 1),
                handles=scan_sequences.HANDLES | {"initial_state"},
                extra=_step_reasons,
            ),
            config=ConfigSpace(
                forward=step.StepTile,
                faces=step.FACES,
                heuristic=step.heuristic,
                candidates=step.candidates,
            ),
            # Before the scans of both packages, whose blocks of tokens would be masked but for one token.
            priority=30,
            cases="ejkernel_triton.selective_scan.step_cases:step_cases",
        ),
    )
