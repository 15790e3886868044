"""Tiled softmax attention by cuDNN, through XLA's custom calls.

By default cuDNN's gradients differ in their last bits from run to run. XLA requests deterministic ones only if
`XLA_FLAGS` has `--xla_gpu_exclude_nondeterministic_ops=true` or `--xla_gpu_deterministic_ops=true`. The backward pass
is registered only then; otherwise another backend computes gradients from the residuals of this forward pass.
"""

import os
from collections.abc import Iterable
from typing import Any

from ejkernel.families.tiled_attention import causal_window_bounds
from ejkernel.ops import Implementation, Requires
from ejkernel.ops.device import current_device


def requests_deterministic_ops() -> bool:
    """Returns whether XLA's flags request deterministic operations."""
    names = ("--xla_gpu_exclude_nondeterministic_ops", "--xla_gpu_deterministic_ops")
    xla_flags = os.environ.get("XLA_FLAGS", "").split()
    return any(flag.partition("=")[0] in names and flag.partition("=")[2] in ("", "true", "1") for flag in xla_flags)


def _refusal_reasons(record: Any) -> Iterable[str]:
    """Yields the reasons to refuse a record that `Requires` cannot express."""
    (_, t, _, d), s = record.query.shape, record.key.shape[1]
    left, right = causal_window_bounds(record)
    if record.value.shape[-1] != d:
        yield f"value: got head size {record.value.shape[-1]}, wants that of query and key, {d}"
    if d > 128 and (current_device().compute_capability or 9.0) < 9.0:
        yield f"query: head size {d} needs compute capability 9.0"
    if (left, right) != (None, None) and right != 0:
        yield f"sliding_window: {record.sliding_window} does not end at the query's own position"
    elif left is not None and t > s:
        yield f"sliding_window: {t} queries are more than the {s} keys"
    if t == s == 1:
        yield "query: got one query and one key, cuDNN wants more"
    if record.bias is not None:
        yield from _bias_refusal_reasons(record)


def _bias_refusal_reasons(record: Any) -> Iterable[str]:
    pairs = (record.query.shape[1], record.key.shape[1])
    if record.bias.shape[2:] != pairs:
        yield f"bias: shape {record.bias.shape}, wants all {pairs[0]} queries and {pairs[1]} keys"
    if record.bias.dtype != record.query.dtype:
        yield f"bias: dtype {record.bias.dtype}, wants query's {record.query.dtype}"


_REQUIRES = Requires(
    devices=frozenset({"nvidia"}),
    min_compute_capability=8.0,
    dtypes=frozenset({"float16", "bfloat16"}),
    head_dims=range(8, 257, 8),
    handles=frozenset({"causal", "sliding_window", "bias"}),
    extra=_refusal_reasons,
)


def implementations() -> tuple[Implementation, ...]:
    """Returns cuDNN's implementation, with its backward pass if that is deterministic."""
    backward = requests_deterministic_ops()
    return (
        Implementation(
            family="tiled_attention",
            name="cudnn",
            platform="cuda",
            forward="ejkernel_cuda.tiled_attention.forward:forward",
            backward="ejkernel_cuda.tiled_attention.backward:backward" if backward else None,
            gradients=frozenset({"query", "key", "value", "bias"}) if backward else frozenset(),
            requires=_REQUIRES,
            priority=15,
        ),
    )
