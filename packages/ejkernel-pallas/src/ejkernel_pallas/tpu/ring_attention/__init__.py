"""Ring attention in Mosaic TPU: the tiles of tiled attention, applied to the keys of one device after another."""

from ejkernel.families.ring_attention import FAMILY
from ejkernel.families.tiled_attention import MASK_FIELDS, SOFTMAX_FIELDS
from ejkernel.ops import ConfigSpace, Implementation
from ejkernel_pallas.tpu.requirements import make_mosaic_tpu_implementation, tpu_requires
from ejkernel_pallas.tpu.ring_attention import config
from ejkernel_pallas.tpu.tiled_attention.config import TpuBackward, TpuForward


def implementations() -> tuple[Implementation, ...]:
    """Returns what this package registers for `ring_attention`."""
    requires = tpu_requires(
        head_dims=range(1, 257), supported_fields=MASK_FIELDS | SOFTMAX_FIELDS | {"bias", "lse_cotangent"}
    )
    return (
        make_mosaic_tpu_implementation(
            FAMILY,
            ConfigSpace.of(config, forward=TpuForward, backward=TpuBackward),
            requires,
            fields_without_gradient=frozenset({"score_mod"}),
        ),
    )
