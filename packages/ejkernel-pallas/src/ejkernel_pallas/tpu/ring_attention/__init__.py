"""Ring attention in Mosaic TPU: the tiles of tiled attention, applied to the keys of one device after another."""

from ejkernel.families.ring_attention import FAMILY
from ejkernel.families.tiled_attention import MASKS, SOFTMAX
from ejkernel.ops import ConfigSpace, Implementation
from ejkernel_pallas.tpu.requirements import tpu_requires
from ejkernel_pallas.tpu.ring_attention import config
from ejkernel_pallas.tpu.tiled_attention.config import PUBLIC_FIELDS, TpuBackward, TpuForward


def implementations() -> tuple[Implementation, ...]:
    """Returns what this package registers for `ring_attention`."""
    return (
        Implementation(
            family="ring_attention",
            name="mosaic_tpu",
            platform="pallas",
            forward="ejkernel_pallas.tpu.ring_attention.forward:forward",
            backward="ejkernel_pallas.tpu.ring_attention.backward:backward",
            gradients=frozenset(FAMILY.differentiable),
            requires=tpu_requires(
                head_dims=range(1, 257),
                handles=MASKS | SOFTMAX | {"bias", "lse_cotangent"},
            ),
            config=ConfigSpace(
                heuristic=config.heuristic,
                candidates=config.candidates,
                forward=TpuForward,
                backward=TpuBackward,
                public_fields=PUBLIC_FIELDS,
            ),
            priority=10,
        ),
    )
