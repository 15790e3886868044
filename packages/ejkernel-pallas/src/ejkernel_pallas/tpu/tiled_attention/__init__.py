"""Tiled softmax attention in Mosaic TPU.

What the kernels need, and what they do not do, is data here; nothing of Pallas is imported before a call.
"""

from collections.abc import Iterable
from typing import Any

from ejkernel.families.tiled_attention import DROPOUT, FAMILY, MASKS, SOFTMAX
from ejkernel.families.tiled_attention.block_maps import pattern_reasons
from ejkernel.ops import ConfigSpace, Implementation
from ejkernel_pallas.tpu.requirements import tpu_requires
from ejkernel_pallas.tpu.tiled_attention import tiles

HANDLES = MASKS | SOFTMAX | DROPOUT | {"bias", "pattern", "precision", "lse_cotangent"}
"""Optional fields that the kernels honour."""


def _reasons(record: Any) -> Iterable[str]:
    """What `Requires` has no word for."""
    if not (record.query.size and record.key.size and record.value.size):
        yield "an array is empty"
        return
    yield from pattern_reasons(record)
    yield from tiles.reasons(record)


def implementations() -> tuple[Implementation, ...]:
    """One implementation."""
    return (
        Implementation(
            family="tiled_attention",
            name="pallas_tpu",
            platform="pallas",
            forward="ejkernel_pallas.tpu.tiled_attention.forward:forward",
            backward="ejkernel_pallas.tpu.tiled_attention.backward:backward",
            gradients=frozenset(FAMILY.differentiable),
            requires=tpu_requires(
                head_dims=range(1, 257),
                handles=HANDLES,
                extra=_reasons,
            ),
            config=ConfigSpace(
                heuristic=tiles.heuristic,
                candidates=tiles.candidates,
                kind=tiles.kind,
                forward=tiles.TpuForward,
                backward=tiles.TpuBackward,
                faces=tiles.FACES,
            ),
            priority=10,
        ),
    )
