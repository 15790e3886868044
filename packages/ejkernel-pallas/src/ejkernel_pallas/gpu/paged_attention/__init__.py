"""Paged attention in Mosaic GPU, for NVIDIA's Hopper.

What the kernel needs, and what it does not do, is data here; nothing of Pallas is imported before a call.
"""

from collections.abc import Callable, Iterable
from typing import Any

from ejkernel.ops import ConfigSpace, Implementation
from ejkernel_pallas.gpu.paged_attention import spec
from ejkernel_pallas.gpu.requirements import hopper_requires

HANDLES = frozenset({"new_keys", "new_values", "num_seqs", "sliding_window", "causal", "value_scale"})
"""Optional fields that the kernel honours."""


def _implementation(name: str, priority: int, reasons: Callable[[Any], Iterable[str]]) -> Implementation:
    return Implementation(
        family="paged_attention",
        name=name,
        platform="pallas",
        forward="ejkernel_pallas.gpu.paged_attention.run:forward",
        requires=hopper_requires(handles=HANDLES, extra=reasons),
        config=ConfigSpace(
            forward=spec.HopperPaged, faces=spec.FACES, heuristic=spec.heuristic, candidates=spec.candidates
        ),
        priority=priority,
        cases="ejkernel_pallas.gpu.paged_attention.cases:cases",
    )


def implementations() -> tuple[Implementation, ...]:
    """The same kernels twice: before Triton's where sequences have many query tokens, and behind all others."""
    return (
        _implementation("mosaic_gpu_prefill", 20, spec.prefill_reasons),
        # Decoding is 7% slower than Triton's: `platform="pallas"` asks for it.
        _implementation("mosaic_gpu", -1, spec.reasons),
    )
