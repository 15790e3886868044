"""Ring attention in Mosaic TPU: the tiles of tiled attention, over one device's keys after the other."""

from collections.abc import Iterable
from typing import Any

from ejkernel.families.ring_attention import FAMILY
from ejkernel.families.tiled_attention import MASKS, SOFTMAX
from ejkernel.ops import ConfigSpace, Implementation, Requires
from ejkernel_pallas.toolchain import JAX
from ejkernel_pallas.tpu.interpret import devices
from ejkernel_pallas.tpu.ring_attention import tiles
from ejkernel_pallas.tpu.tiled_attention.tiles import FACES, TpuBackward, TpuForward


def _empty(record: Any) -> Iterable[str]:
    if not (record.query.size and record.key.size and record.value.size):
        yield "an array is empty"


def implementations() -> tuple[Implementation, ...]:
    """What this package registers for `ring_attention`."""
    return (
        Implementation(
            family="ring_attention",
            name="pallas_tpu",
            platform="pallas",
            backend="tpu",
            forward="ejkernel_pallas.tpu.ring_attention.dispatch:forward",
            backward="ejkernel_pallas.tpu.ring_attention.dispatch:backward",
            gradients=frozenset(FAMILY.differentiable),
            requires=Requires(
                devices=devices(),
                modules=JAX,
                dtypes=frozenset({"bfloat16", "float32"}),
                head_dims=range(1, 257),
                handles=MASKS | SOFTMAX | {"bias", "lse_cotangent"},
                extra=_empty,
            ),
            config=ConfigSpace(
                heuristic=tiles.heuristic,
                candidates=tiles.candidates,
                forward=TpuForward,
                backward=TpuBackward,
                faces=FACES,
            ),
            priority=10,
        ),
    )
