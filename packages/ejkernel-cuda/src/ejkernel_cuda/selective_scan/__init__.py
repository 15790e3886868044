"""The selective scan (Mamba-1) in CUDA C++: states in registers, B and C in shared memory."""

from collections.abc import Callable, Iterable
from typing import Any

from ejkernel.families.selective_scan import scan_sequences
from ejkernel.ops import ConfigSpace, Implementation, Requires
from ejkernel.ops.device import DeviceInfo, current_device
from ejkernel.ops.params import Direction
from ejkernel_cuda.requirements import cuda_requires
from ejkernel_cuda.selective_scan import config

MAX_LOW_PRIORITY_STATE_DIM = 8
"""The state dimension up to which Triton's backward pass is faster: 3.13 ms with this forward pass instead of 3.72."""

MIN_WARPGROUPS_FOR_PRIORITY = 128
"""The number of warpgroups from which on the backward kernel is faster than Triton's, which splits sequences into
segments.
"""

DTYPES = ("float16", "bfloat16", "float32")


def _refusal_reasons(record: Any) -> Iterable[str]:
    """Yields the reasons to refuse a record that `Requires` cannot express."""
    if str(record.step.dtype) not in DTYPES:
        yield f"dt: got {record.step.dtype}, the kernel reads {', '.join(DTYPES)}"


def _gradient_refusal_reasons(record: Any) -> Iterable[str]:
    """Yields the additional reasons why the backward kernel cannot serve a record."""
    yield from _refusal_reasons(record)
    channels = record.x.shape[2]
    if channels % config.CHANNEL_ALIGNMENT:
        yield f"hidden_states: got {channels} channels, the kernel wants a multiple of {config.CHANNEL_ALIGNMENT}"
    capability = current_device().compute_capability
    if capability is not None and capability >= 12.0:
        yield f"compute capability {capability}: the kernel needs more shared memory than the chip has"


def _priority(record: Any, device: DeviceInfo, direction: Direction) -> int:
    """Returns a priority above Triton's 10: 0.70 ms instead of 1.06 forward on an H200, and more for fewer rows
    (docs/cuda.md).

    Triton's backward pass is faster with small states and with few rows, which were not measured here.
    """
    if direction == "backward" and (
        record.decay.shape[1] <= MAX_LOW_PRIORITY_STATE_DIM
        or config.num_warpgroups(record) < MIN_WARPGROUPS_FOR_PRIORITY
    ):
        return -1
    return 20


def _make_requires(min_compute_capability: float, extra_reasons: Callable[[Any], Iterable[str]]) -> Requires:
    return cuda_requires(
        min_compute_capability,
        DTYPES,
        handles=scan_sequences.PACKED_STATE_FIELDS | {"initial_state"},
        extra_reasons=extra_reasons,
        head_dims=range(1, config.MAX_STATE_DIM + 1),
    )


IMPLEMENTATIONS = (
    Implementation(
        family="selective_scan",
        name="cuda",
        platform="cuda",
        forward="ejkernel_cuda.selective_scan.forward:forward",
        backward="ejkernel_cuda.selective_scan.backward:backward",
        gradients=frozenset({"x", "step", "decay", "write", "read", "skip", "initial_state"}),
        requires=_make_requires(8.0, _refusal_reasons),
        backward_requires=_make_requires(9.0, _gradient_refusal_reasons),
        config=ConfigSpace(
            heuristic=config.heuristic,
            candidates=config.candidates,
            forward=config.ScanTile,
            backward=config.GradientTile,
            batch_invariant=config.batch_invariant,
        ),
        cases="ejkernel_cuda.selective_scan.cases:cases",
        priority=_priority,
        invariant_to=frozenset({"batch", "padding", "packing", "chunking"}),
        invariant_priority=20,
    ),
)
