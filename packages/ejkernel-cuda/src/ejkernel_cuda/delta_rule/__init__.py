"""Recurrences with a gate per head or none in CUDA C++ for Hopper, with the delta rule and without: a scan per
direction, whose warpgroups have roles, and the gradients of tokens.
"""

from collections.abc import Callable, Iterable

from ejkernel.families.linear_recurrence import LinearRecurrence, has_decay_per_channel
from ejkernel.ops import Implementation, Requires
from ejkernel.ops.device import DeviceInfo, current_device
from ejkernel.ops.params import Direction
from ejkernel_cuda.delta_rule.plan import VALUE_CHANNELS_PER_BLOCK, num_scan_blocks
from ejkernel_cuda.requirements import cuda_requires
from ejkernel_cuda.split_values import gradient_value_reasons

HANDLED_FIELDS = frozenset({"decay", "initial_state", "cu_seqlens", "sequence_state"})
"""Optional fields that the kernels honour, next to beta."""

HANDLED_FIELDS_WITHOUT_DELTA = HANDLED_FIELDS | {"dt", "skip", "transposed_states"}
"""Optional fields that the kernels honour without the delta rule."""

DIFFERENTIABLE_FIELDS = (HANDLED_FIELDS - {"cu_seqlens"}) | {"query", "key", "value"}

KEY_DIM = 128
"""The key dimension that the kernel is compiled for."""

MAX_SHORT_ROW_TOKENS, MIN_BUSY_BLOCKS = 8192, 48
"""With the delta rule and no decay all blocks begin with the row: with 32 of them a row of 8192 tokens takes 0.261 ms
instead of Triton's 0.334, one of 65536 1.90 instead of 1.54 (docs/lab/linear_recurrence_gpu.md).
"""

HOPPER_COMPUTE_CAPABILITY = 9.0
"""The compute capability whose instructions the kernel consists of; no later chip has them."""


def _refusal_reasons(record: LinearRecurrence) -> Iterable[str]:
    """Yields the reasons to refuse a record that `Requires` cannot express."""
    if has_decay_per_channel(record):
        yield "decay: got gates per key channel, the kernel reads gates per head"
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
    yield from gradient_value_reasons(record)
    queries, keys = record.query.shape[2], record.key.shape[2]
    if queries != keys and not (record.dt is None and record.skip is None):
        yield f"key: got {keys} heads and {queries} of queries, the gradients of dt and skip want the same number"


def _refusal_reasons_with_delta(record: LinearRecurrence) -> Iterable[str]:
    if record.beta is None:
        yield "beta: got None; the implementation 'cuda_chunked' serves recurrences without the delta rule"
    yield from _refusal_reasons(record)


def _gradient_refusal_reasons_with_delta(record: LinearRecurrence) -> Iterable[str]:
    if record.beta is None:
        yield "beta: got None; the implementation 'cuda_chunked' serves recurrences without the delta rule"
    yield from _gradient_refusal_reasons(record)


def _priority(record: LinearRecurrence, device: DeviceInfo, direction: Direction) -> int:
    """Returns a priority between Triton's chunked kernels, 10, and decode steps, 20."""
    return 15


def _priority_with_delta(record: LinearRecurrence, device: DeviceInfo, direction: Direction) -> int:
    """Returns `_priority`; below Triton's for long rows without a decay on few multiprocessors: blocks scan them from
    their first token.
    """
    is_long = record.decay is None and record.query.shape[1] > MAX_SHORT_ROW_TOKENS
    return 5 if is_long and num_scan_blocks(record) < MIN_BUSY_BLOCKS else _priority(record, device, direction)


def _make_requires(
    extra_reasons: Callable[[LinearRecurrence], Iterable[str]], handles: frozenset[str] = HANDLED_FIELDS
) -> Requires:
    return cuda_requires(HOPPER_COMPUTE_CAPABILITY, {"bfloat16"}, handles=handles, extra_reasons=extra_reasons)


IMPLEMENTATIONS = (
    Implementation(
        family="linear_recurrence",
        name="cuda_delta",
        platform="cuda",
        forward="ejkernel_cuda.delta_rule.forward:forward",
        backward="ejkernel_cuda.delta_rule.backward:backward",
        row_states="ejkernel_cuda.delta_rule.backward:row_states",
        gradients=DIFFERENTIABLE_FIELDS | {"beta"},
        paired=True,
        requires=_make_requires(_refusal_reasons_with_delta, HANDLED_FIELDS | {"beta"}),
        backward_requires=_make_requires(_gradient_refusal_reasons_with_delta, HANDLED_FIELDS | {"beta"}),
        priority=_priority_with_delta,
        cases="ejkernel_cuda.delta_rule.cases:cases",
    ),
    Implementation(
        family="linear_recurrence",
        name="cuda_chunked",
        platform="cuda",
        forward="ejkernel_cuda.delta_rule.forward:forward",
        backward="ejkernel_cuda.delta_rule.backward:backward",
        row_states="ejkernel_cuda.delta_rule.forward:row_states",
        gradients=DIFFERENTIABLE_FIELDS | {"dt", "skip"},
        paired=True,
        requires=_make_requires(_refusal_reasons, HANDLED_FIELDS_WITHOUT_DELTA),
        backward_requires=_make_requires(_gradient_refusal_reasons, HANDLED_FIELDS_WITHOUT_DELTA),
        priority=_priority,
        cases="ejkernel_cuda.delta_rule.cases:cases_without_delta",
    ),
)
