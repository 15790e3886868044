"""Dense latent caches (`mla_decode`) on the paged kernel of Mosaic TPU.

The requirements of the kernel are data in this module, which imports nothing of Pallas.
"""

from collections.abc import Generator
from typing import Any

from ejkernel.families.tiled_attention import FAMILY
from ejkernel.ops import ConfigSpace, Implementation
from ejkernel_pallas.tpu import paged_attention
from ejkernel_pallas.tpu.latent_attention import config
from ejkernel_pallas.tpu.latent_attention.plan import paged_record_shapes
from ejkernel_pallas.tpu.requirements import make_mosaic_tpu_implementation, tpu_requires

SUPPORTED_OPTIONAL_FIELDS = frozenset(
    {"q_segment_ids", "kv_segment_ids", "q_positions", "softmax_aux", "logits_soft_cap", "sliding_window"}
)
"""Optional fields that the records of `mla_decode` can have."""

FIXED_IF_INVARIANT = ("block_kv", "product_rows", "product_keys")
"""Fields of the configuration that sums depend on."""


def _refusal_reasons(record: Any) -> Generator[str]:
    """Yields the reasons to refuse a record."""
    yield from paged_attention.refusal_reasons(paged_record_shapes(record))


def implementations() -> tuple[Implementation, ...]:
    """Returns the implementation."""
    return (
        make_mosaic_tpu_implementation(
            FAMILY,
            ConfigSpace.of(config, forward=config.TpuPaged, fixed_if_invariant=FIXED_IF_INVARIANT),
            tpu_requires(
                head_dims=range(1, 1025), supported_fields=SUPPORTED_OPTIONAL_FIELDS, refusal_reasons=_refusal_reasons
            ),
            folder="latent_attention",
            backward=False,
            only=frozenset({"mla_decode"}),
            name="mosaic_tpu_latent",
            priority=20,
            invariant_to=frozenset({"batch", "padding"}),
            cases="ejkernel_pallas.tpu.latent_attention.cases:cases",
        ),
    )
