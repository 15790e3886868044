"""Attention over caches of latent vectors in Mosaic GPU, for NVIDIA's Hopper.

The requirements of the kernel are data in this module, which imports nothing of Pallas.
"""

from collections.abc import Callable, Iterable
from typing import Any

from ejkernel.ops import ConfigSpace, Implementation
from ejkernel_pallas.gpu.latent_attention import config, spec
from ejkernel_pallas.gpu.requirements import hopper_requires

HANDLES = frozenset({"latent", "new_keys", "num_seqs", "value_scale", "sliding_window"})
"""Optional fields of the paged family that the kernel honours."""

DECODE_HANDLES = frozenset({"q_segment_ids", "kv_segment_ids", "q_positions", "sliding_window"})
"""Optional fields of the records of `mla_decode` that the kernel honours."""


def _implementation(
    handles: frozenset[str], find_refusal_reasons: Callable[[Any], Iterable[str]], **implementation_fields: Any
) -> Implementation:
    return Implementation(
        platform="pallas",
        requires=hopper_requires(
            handles=handles,
            find_refusal_reasons=find_refusal_reasons,
        ),
        config=ConfigSpace.of(config, forward=config.HopperLatent),
        # Above Triton's: 2.2 times as fast with 128 heads, and as fast with 16, where memory is the bottleneck.
        priority=30,
        cases="ejkernel_pallas.gpu.latent_attention.cases:cases",
        **implementation_fields,
    )


def implementations() -> tuple[Implementation, ...]:
    """Returns the implementations for paged caches and for dense caches."""
    run = "ejkernel_pallas.gpu.latent_attention.forward"
    return (
        _implementation(
            HANDLES, spec.refusal_reasons, family="paged_attention", name="mosaic_gpu_latent", forward=f"{run}:forward"
        ),
        _implementation(
            DECODE_HANDLES,
            spec.decode_refusal_reasons,
            family="tiled_attention",
            only=frozenset({"mla_decode"}),
            name="mosaic_gpu_latent",
            forward=f"{run}:forward_dense_cache",
        ),
    )
