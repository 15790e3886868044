"""Tiled softmax attention in Mosaic GPU, for NVIDIA's Hopper.

The requirements of the kernels are data in this module, which imports nothing of Pallas.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from ejkernel.families.tiled_attention import DROPOUT_FIELDS, MASK_FIELDS, SOFTMAX_FIELDS, invariance_limits
from ejkernel.families.tiled_attention.block_maps import pattern_refusals
from ejkernel.families.tiled_attention.function_refusals import function_refusals
from ejkernel.families.tiled_attention.kinds import tuning_key_of_large_calls
from ejkernel.ops import ConfigSpace, Implementation, Requires
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.params import Direction
from ejkernel_pallas.gpu.requirements import hopper_requires
from ejkernel_pallas.gpu.tiled_attention import config

POSITIONS = frozenset({"q_positions", "kv_positions"})
"""Optional fields that the forward kernel alone honours."""
HANDLES = (MASK_FIELDS - POSITIONS - {"mask"}) | {"pattern", "lse_cotangent"} | SOFTMAX_FIELDS | DROPOUT_FIELDS
"""Optional fields that the kernels of both passes honour."""


def _refusal_reasons(record: Any) -> Iterable[str]:
    """Yields the reasons to refuse a record that `Requires` cannot express."""
    size, value_size = record.query.shape[3], record.value.shape[3]
    if value_size not in config.VALUE_HEAD_DIMS.get(size, (value_size,)):
        yield (
            f"value has head dimension {value_size} and query {size}; the kernel wants values of "
            f"{config.VALUE_HEAD_DIMS[size][0]}"
        )
    if record.pattern is not None:
        yield from pattern_refusals(record)
    if not record.softmax_scale > 0:
        yield f"softmax_scale is {record.softmax_scale}; the kernel wants a positive number"
    if _has_positions(record) and (record.q_segment_ids is not None or record.pattern is not None):
        yield "q_positions: with segment ids or a pattern, the kernel compares indices"


def _function_refusal_reasons(record: Any) -> Iterable[str]:
    """Yields the same for calls with functions of pairs, which have evidence of their own."""
    yield from _refusal_reasons(record)
    yield from function_refusals(record)


def _has_positions(record: Any) -> bool:
    return any(getattr(record, name) is not None for name in POSITIONS)


def _priority(record: Any, device: DeviceInfo, direction: Direction) -> int:
    """Returns a priority above Triton's, except for calls with positions, timed only in a `batch_invariant` block."""
    return -1 if _has_positions(record) else 20


def batch_invariant(
    record: Any, device: DeviceInfo, direction: Direction
) -> config.HopperForward | config.HopperBackward:
    """Returns the configuration of a call in a `batch_invariant` block, which no length and no position changes."""
    first, *others = config.candidates(record, device, direction)
    if not isinstance(first, config.HopperForward):
        return first
    # Running maxima, a soft cap and positions together do not fit the registers of three consumer warpgroups.
    has_few_registers = first.block_q == 192 and record.logits_soft_cap is not None
    part = others[0] if has_few_registers and str(record.query.dtype) == "float16" else first
    return dataclasses.replace(part, batch_invariant=True)


def implementations() -> tuple[Implementation, ...]:
    """Returns the implementation, and that of calls with `score_mod` or `mask_mod`."""
    run = "ejkernel_pallas.gpu.tiled_attention"
    space = ConfigSpace.of(
        config,
        forward=config.HopperForward,
        backward=config.HopperBackward,
        kind=tuning_key_of_large_calls,
        fixed_if_invariant=("block_kv", "batch_invariant"),
    )
    plain = Implementation(
        family="tiled_attention",
        name="mosaic_gpu",
        platform="pallas",
        forward=f"{run}.forward:forward",
        backward=f"{run}.backward:backward",
        gradients=frozenset({"query", "key", "value", "softmax_aux"}),
        requires=_requires(HANDLES | POSITIONS, _refusal_reasons),
        backward_requires=_requires(HANDLES, _refusal_reasons),
        cases=f"{run}.cases:cases",
        config=dataclasses.replace(space, batch_invariant=batch_invariant),
        priority=_priority,
        # A chunk of a prompt has positions: it must not run another kernel than the prompt.
        invariant_to=frozenset({"batch", "padding", "packing", "chunking"}),
        invariance_limits=invariance_limits,
        invariant_priority=20,
    )
    functions = dataclasses.replace(
        plain,
        name="mosaic_gpu_functions",
        backward_requires=None,
        config=space,
        priority=20,
        invariant_to=frozenset(),
        invariant_priority=None,
        requires=_requires(HANDLES - {"pattern"} | {"score_mod", "mask_mod"}, _function_refusal_reasons),
        cases=f"{run}.cases:function_cases",
    )
    return plain, functions


def _requires(handles: frozenset[str], reasons: Callable[[Any], Iterable[str]]) -> Requires:
    return hopper_requires(head_dims=tuple(config.VALUE_HEAD_DIMS), handles=handles, find_refusal_reasons=reasons)
