"""Recurrences with gates per key channel in CUDA C++ for Hopper, with the delta rule and without: a kernel that
prepares chunks, a scan per direction, and the gradients of tokens.
"""

from collections.abc import Iterable

from ejkernel.families.linear_recurrence import LinearRecurrence, has_decay_per_channel
from ejkernel.ops import Implementation
from ejkernel.ops.device import DeviceInfo, current_device
from ejkernel.ops.params import Direction
from ejkernel_cuda.delta_rule.plan import VALUE_CHANNELS_PER_BLOCK
from ejkernel_cuda.requirements import cuda_requires

HANDLED_FIELDS = frozenset({"decay", "beta", "initial_state", "cu_seqlens", "sequence_state"})
"""Optional fields that the kernels honour."""

DIFFERENTIABLE_FIELDS = (HANDLED_FIELDS - {"cu_seqlens"}) | {"query", "key", "value"}

KEY_DIM = 128
"""The key dimension that the kernels are compiled for."""

VALUE_DIMS_WITH_GRADIENTS = (64, 128)
"""The value dimensions that the kernel of gradients is compiled for."""

HOPPER_COMPUTE_CAPABILITY = 9.0
"""The compute capability whose instructions the kernels consist of; no later chip has them."""


def _refusal_reasons(record: LinearRecurrence) -> Iterable[str]:
    """Yields the reasons to refuse a record that `Requires` cannot express."""
    if not has_decay_per_channel(record):
        yield "decay: got gates per head or none, the kernel reads gates per key channel"
    dtypes = {str(x.dtype) for x in (record.query, record.key, record.value)}
    if len(dtypes) > 1:
        yield f"query: got other dtypes of key or value, wants one dtype instead of {', '.join(sorted(dtypes))}"
    if record.query.shape[3] != KEY_DIM:
        yield f"query: got head dimension {record.query.shape[3]}, the kernel wants one of {KEY_DIM}"
    if record.value.shape[3] % VALUE_CHANNELS_PER_BLOCK:
        wants = f"the kernel wants a multiple of {VALUE_CHANNELS_PER_BLOCK}"
        yield f"value: got head dimension {record.value.shape[3]}, {wants}"
    capability = current_device().compute_capability
    if capability is not None and int(capability) != int(HOPPER_COMPUTE_CAPABILITY):
        yield f"compute capability {capability}: the kernel is compiled for {HOPPER_COMPUTE_CAPABILITY} alone"


def _gradient_refusal_reasons(record: LinearRecurrence) -> Iterable[str]:
    """Yields the reasons why the backward kernels cannot serve a record."""
    yield from _refusal_reasons(record)
    if record.value.shape[3] not in VALUE_DIMS_WITH_GRADIENTS:
        wants = " and ".join(map(str, VALUE_DIMS_WITH_GRADIENTS))
        yield f"value: got head dimension {record.value.shape[3]}, the kernels of gradients want {wants}"


def _priority(record: LinearRecurrence, device: DeviceInfo, direction: Direction) -> int:
    """Returns a priority between Triton's chunked kernels, 10, and decode steps, 20."""
    return 15


IMPLEMENTATIONS = (
    Implementation(
        family="linear_recurrence",
        name="cuda_channel_gates",
        platform="cuda",
        forward="ejkernel_cuda.channel_gates.forward:forward",
        backward="ejkernel_cuda.channel_gates.backward:backward",
        row_states="ejkernel_cuda.channel_gates.backward:row_states",
        gradients=DIFFERENTIABLE_FIELDS,
        paired=True,
        requires=cuda_requires(
            HOPPER_COMPUTE_CAPABILITY, {"bfloat16"}, handles=HANDLED_FIELDS, extra_reasons=_refusal_reasons
        ),
        backward_requires=cuda_requires(
            HOPPER_COMPUTE_CAPABILITY, {"bfloat16"}, handles=HANDLED_FIELDS, extra_reasons=_gradient_refusal_reasons
        ),
        priority=_priority,
        cases="ejkernel_cuda.channel_gates.cases:cases",
    ),
)
