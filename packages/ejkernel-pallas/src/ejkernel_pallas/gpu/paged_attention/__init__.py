"""Paged attention in Mosaic GPU, for NVIDIA's Hopper.

What the kernel needs, and what it does not do, is data here; nothing of Pallas is imported before a call.
"""

from collections.abc import Iterable
from typing import Any

from ejkernel.ops import ConfigSpace, Implementation, Requires
from ejkernel.ops.device import current_device
from ejkernel_pallas.gpu.paged_attention import spec
from ejkernel_pallas.toolchain import JAX

HANDLES = frozenset({"new_keys", "new_values", "num_seqs", "sliding_window", "causal", "value_scale"})
"""Optional fields that the kernel honours."""


def _reasons(record: Any) -> Iterable[str]:
    """What `Requires` has no word for."""
    capability = current_device().compute_capability
    if capability is not None and capability >= 10.0:
        yield f"compute capability {capability}: the instructions that the kernel is made of are those of 9.0 alone"
    yield from spec.reasons(record)


def implementations() -> tuple[Implementation, ...]:
    """One, of the whole family."""
    return (
        Implementation(
            family="paged_attention",
            name="mosaic_gpu",
            platform="pallas",
            backend="gpu",
            forward="ejkernel_pallas.gpu.paged_attention.run:forward",
            requires=Requires(
                devices=frozenset({"nvidia"}),
                modules=JAX,
                min_compute_capability=9.0,
                dtypes=frozenset({"float16", "bfloat16"}),
                handles=HANDLES,
                extra=_reasons,
            ),
            config=ConfigSpace(
                forward=spec.HopperPaged, faces=spec.FACES, heuristic=spec.heuristic, candidates=spec.candidates
            ),
            # Below all others until it has passed the suite on a GPU: `platform="pallas"` asks for it.
            priority=-1,
            cases="ejkernel_pallas.gpu.paged_attention.cases:cases",
        ),
    )
