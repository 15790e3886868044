"""Paged attention in Mosaic GPU, for NVIDIA's Hopper.

What the kernel needs, and what it does not do, is data here; nothing of Pallas is imported before a call.
"""

from ejkernel.ops import ConfigSpace, Implementation
from ejkernel_pallas.gpu.paged_attention import spec
from ejkernel_pallas.gpu.requirements import hopper_requires

HANDLES = frozenset({"new_keys", "new_values", "num_seqs", "sliding_window", "causal", "value_scale"})
"""Optional fields that the kernel honours."""


def implementations() -> tuple[Implementation, ...]:
    """One implementation, which serves every operation of the family."""
    return (
        Implementation(
            family="paged_attention",
            name="mosaic_gpu",
            platform="pallas",
            backend="gpu",
            forward="ejkernel_pallas.gpu.paged_attention.run:forward",
            requires=hopper_requires(
                handles=HANDLES,
                extra=spec.reasons,
            ),
            config=ConfigSpace(
                forward=spec.HopperPaged, faces=spec.FACES, heuristic=spec.heuristic, candidates=spec.candidates
            ),
            # Below all others until it has passed the suite on a GPU: `platform="pallas"` asks for it.
            priority=-1,
            cases="ejkernel_pallas.gpu.paged_attention.cases:cases",
        ),
    )
