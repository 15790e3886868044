"""Tiled softmax attention in Mosaic GPU, for NVIDIA's Hopper.

The requirements of the kernels are data in this module, which imports nothing of Pallas.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from ejkernel.families.tiled_attention import DROPOUT_FIELDS, SOFTMAX_FIELDS
from ejkernel.families.tiled_attention.block_maps import pattern_refusals
from ejkernel.families.tiled_attention.function_refusals import function_refusals
from ejkernel.families.tiled_attention.kinds import tuning_key_of_large_calls
from ejkernel.ops import ConfigSpace, Implementation, Requires
from ejkernel_pallas.gpu.requirements import hopper_requires
from ejkernel_pallas.gpu.tiled_attention import config

HANDLES = (
    frozenset({"q_segment_ids", "kv_segment_ids", "causal", "sliding_window", "pattern", "lse_cotangent"})
    | SOFTMAX_FIELDS
    | DROPOUT_FIELDS
)
"""Optional fields that the kernels honour."""


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


def _function_refusal_reasons(record: Any) -> Iterable[str]:
    """Yields the same for calls with functions of pairs, which have evidence of their own."""
    yield from _refusal_reasons(record)
    yield from function_refusals(record)


def implementations() -> tuple[Implementation, ...]:
    """Returns the implementation, and that of calls with `score_mod` or `mask_mod`."""
    run = "ejkernel_pallas.gpu.tiled_attention"
    plain = Implementation(
        family="tiled_attention",
        name="mosaic_gpu",
        platform="pallas",
        forward=f"{run}.forward:forward",
        backward=f"{run}.backward:backward",
        gradients=frozenset({"query", "key", "value", "softmax_aux"}),
        requires=_requires(HANDLES, _refusal_reasons),
        cases=f"{run}.cases:cases",
        config=ConfigSpace.of(
            config, forward=config.HopperForward, backward=config.HopperBackward, kind=tuning_key_of_large_calls
        ),
        priority=20,
    )
    functions = dataclasses.replace(
        plain,
        name="mosaic_gpu_functions",
        requires=_requires(HANDLES - {"pattern"} | {"score_mod", "mask_mod"}, _function_refusal_reasons),
        cases=f"{run}.cases:function_cases",
    )
    return plain, functions


def _requires(handles: frozenset[str], reasons: Callable[[Any], Iterable[str]]) -> Requires:
    return hopper_requires(head_dims=tuple(config.VALUE_HEAD_DIMS), handles=handles, find_refusal_reasons=reasons)
