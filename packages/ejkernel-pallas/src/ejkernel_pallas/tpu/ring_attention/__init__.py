"""Ring attention in Mosaic TPU: the tiles of tiled attention, applied to the keys of one device after another."""

from collections.abc import Iterable

from ejkernel.families.ring_attention import FAMILY, RingAttention, as_tiled_attention
from ejkernel.families.tiled_attention import MASK_FIELDS, SOFTMAX_FIELDS
from ejkernel.ops import ConfigSpace, Implementation
from ejkernel_pallas.tpu.mosaic.split_functions import function_refusal_reasons
from ejkernel_pallas.tpu.requirements import make_mosaic_tpu_implementation, tpu_requires
from ejkernel_pallas.tpu.ring_attention import config
from ejkernel_pallas.tpu.tiled_attention import pair_list_refusal_reasons
from ejkernel_pallas.tpu.tiled_attention.config import TpuBackward, TpuForward

FUNCTION_FIELDS = ("score_mod", "mask_mod", "index_origin")
SUPPORTED_OPTIONAL_FIELDS = MASK_FIELDS | SOFTMAX_FIELDS | {"bias", "lse_cotangent", *FUNCTION_FIELDS}
"""Optional fields that the kernels support."""


def _refusal_reasons(record: RingAttention) -> Iterable[str]:
    """Yields the reasons to refuse a record that `Requires` cannot express."""
    yield from function_refusal_reasons(record)
    if record.mask_mod is not None:
        yield from pair_list_refusal_reasons(as_tiled_attention(record))


def implementations() -> tuple[Implementation, ...]:
    """Returns what this package registers for `ring_attention`."""
    requires = tpu_requires(
        head_dims=range(1, 257), supported_fields=SUPPORTED_OPTIONAL_FIELDS, refusal_reasons=_refusal_reasons
    )
    return (
        make_mosaic_tpu_implementation(
            FAMILY, ConfigSpace.of(config, forward=TpuForward, backward=TpuBackward), requires
        ),
    )
