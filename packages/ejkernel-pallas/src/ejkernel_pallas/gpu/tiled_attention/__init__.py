"""Tiled softmax attention in Mosaic GPU, for NVIDIA's Hopper.

What the kernels need, and what they do not do, is data here; nothing of Pallas is imported before a call.
"""

from collections.abc import Callable, Iterable
from typing import Any

from ejkernel.families.tiled_attention import DROPOUT, SOFTMAX
from ejkernel.ops import ConfigSpace, Implementation, Requires
from ejkernel.ops.device import current_device
from ejkernel.planning.attention_kinds import kind_of_large
from ejkernel.planning.block_maps import pattern_reasons
from ejkernel_pallas.gpu.tiled_attention import tiles
from ejkernel_pallas.toolchain import JAX

HANDLES = (
    frozenset({"q_segment_ids", "kv_segment_ids", "causal", "sliding_window", "pattern", "lse_cotangent"})
    | SOFTMAX
    | DROPOUT
)
"""Optional fields that the kernels honour."""


def _reasons(record: Any) -> Iterable[str]:
    """What `Requires` has no word for."""
    capability = current_device().compute_capability
    if capability is not None and capability >= 10.0:
        yield f"compute capability {capability}: the instructions that the kernels are made of are those of 9.0 alone"
    if not (record.query.size and record.key.size and record.value.size):
        yield "an array is empty"
    size, value_size = record.query.shape[3], record.value.shape[3]
    if value_size not in tiles.VALUES.get(size, (value_size,)):
        yield f"value has head size {value_size}, query has {size}: values of {tiles.VALUES[size][0]} go with that"
    if record.pattern is not None:
        yield from pattern_reasons(record)
    if not record.softmax_scale > 0:
        yield f"softmax_scale {record.softmax_scale} is not above zero"


def _requires(sizes: tuple[int, ...], extra: Callable[[Any], Iterable[str]]) -> Requires:
    return Requires(
        devices=frozenset({"nvidia"}),
        modules=JAX,
        min_compute_capability=9.0,
        dtypes=frozenset({"float16", "bfloat16"}),
        head_dims=sizes,
        handles=HANDLES,
        extra=extra,
    )


def implementations() -> tuple[Implementation, ...]:
    """One implementation."""
    return (
        Implementation(
            family="tiled_attention",
            name="mosaic_gpu",
            platform="pallas",
            backend="gpu",
            forward="ejkernel_pallas.gpu.tiled_attention.forward.run:forward",
            backward="ejkernel_pallas.gpu.tiled_attention.backward.run:backward",
            gradients=frozenset({"query", "key", "value", "softmax_aux"}),
            requires=_requires(tuple(tiles.VALUES), _reasons),
            cases="ejkernel_pallas.gpu.tiled_attention.cases:cases",
            config=ConfigSpace(
                heuristic=tiles.heuristic,
                candidates=tiles.candidates,
                kind=kind_of_large,
                forward=tiles.HopperForward,
                backward=tiles.HopperBackward,
                faces=tiles.FACES,
            ),
            priority=20,
            tuned="ejkernel_pallas:tuned",
        ),
    )
