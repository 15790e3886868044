"""Paged softmax attention in Mosaic TPU: one kernel for caches that are only read and for those that are written to.

What the kernel needs, and what it does not do, is data here; nothing of Pallas is imported before a call.
"""

from collections.abc import Iterable
from typing import Any

from ejkernel.ops import ConfigSpace, Implementation
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.params import Direction
from ejkernel_pallas.tpu.paged_attention import limits, tiles
from ejkernel_pallas.tpu.requirements import tpu_requires

HANDLES = frozenset(
    {
        "causal",
        "latent",
        "compute_dtype",
        "logits_soft_cap",
        "new_keys",
        "new_values",
        "num_seqs",
        "sliding_window",
        "softmax_aux",
        "value_scale",
    }
)
"""Optional fields that the kernel honours."""

OPS = frozenset(
    {
        "chunked_prefill_paged_decode",
        "decode_attention",
        "multi_latent_ragged_page_attention",
        "multi_latent_ragged_page_attention_v2",
        "page_attention",
        "prefill_page_attention",
        "ragged_page_attention_v2",
        "ragged_page_attention_v3",
        "unified_attention",
    }
)
"""The operations over pages; others have none."""


def _reasons(record: Any) -> Iterable[str]:
    """What `Requires` has no word for."""
    return limits.reasons(record)


LATENT_HANDLES = frozenset(
    {"q_segment_ids", "kv_segment_ids", "q_positions", "softmax_aux", "logits_soft_cap", "sliding_window"}
)
"""Optional fields that the records of `mla_decode` can have."""


def _latent_reasons(record: Any) -> Iterable[str]:
    # Imported with the first call: listing implementations imports nothing of Pallas.
    from ejkernel_pallas.tpu.paged_attention import latent_decode

    return latent_decode.reasons(record)


def _latent_heuristic(record: Any, device: DeviceInfo, direction: Direction) -> tiles.TpuPaged:
    from ejkernel_pallas.tpu.paged_attention import latent_decode

    return latent_decode.heuristic(record, device, direction)


def _latent_candidates(record: Any, device: DeviceInfo, direction: Direction) -> tuple[tiles.TpuPaged, ...]:
    from ejkernel_pallas.tpu.paged_attention import latent_decode

    return latent_decode.candidates(record, device, direction)


def implementations() -> tuple[Implementation, ...]:
    """The family's, and one of the dense latent cache."""
    return (
        Implementation(
            family="paged_attention",
            only=OPS,
            name="pallas_tpu",
            platform="pallas",
            forward="ejkernel_pallas.tpu.paged_attention.forward:forward",
            requires=tpu_requires(
                head_dims=range(1, 1025),
                handles=HANDLES,
                extra=_reasons,
            ),
            config=ConfigSpace(
                heuristic=tiles.heuristic,
                candidates=tiles.candidates,
                forward=tiles.TpuPaged,
                faces=tiles.FACES,
            ),
            priority=10,
            cases="ejkernel_pallas.tpu.paged_attention.cases:cases",
        ),
        Implementation(
            family="tiled_attention",
            only=frozenset({"mla_decode"}),
            name="pallas_tpu_latent",
            platform="pallas",
            forward="ejkernel_pallas.tpu.paged_attention.latent_decode:forward",
            requires=tpu_requires(
                head_dims=range(1, 1025),
                handles=LATENT_HANDLES,
                extra=_latent_reasons,
            ),
            config=ConfigSpace(
                heuristic=_latent_heuristic,
                candidates=_latent_candidates,
                forward=tiles.TpuPaged,
                faces=tiles.FACES,
            ),
            priority=20,
        ),
    )
