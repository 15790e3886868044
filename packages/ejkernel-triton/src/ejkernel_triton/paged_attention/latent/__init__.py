"""`mla_decode` on the paged kernels: a dense cache of latent vectors is a paged cache with one page per sequence."""

from collections.abc import Iterable
from typing import Any

from ejkernel.ops import ConfigSpace, Implementation
from ejkernel.ops.device import current_device
from ejkernel_triton.paged_attention.config import PUBLIC_FIELDS, PagedForward
from ejkernel_triton.paged_attention.latent import config
from ejkernel_triton.requirements import triton_implementation, triton_requires

HANDLED_FIELDS = frozenset(
    {"q_segment_ids", "kv_segment_ids", "q_positions", "softmax_aux", "logits_soft_cap", "sliding_window"}
)
"""Optional fields that the records of `mla_decode` can have."""


def _refusal_reasons(record: Any) -> Iterable[str]:
    """Yields the reasons to refuse a record of `mla_decode` that `Requires` cannot express."""
    if record.key.shape[-1] > 640 or (record.value.shape[-1] > 512 and record.value.shape[-1] < record.key.shape[-1]):
        yield f"key: got rows of {record.key.shape[-1]}, the kernel has at most 512 latent columns and 128 rotary ones"
        return
    if reason := config.shared_memory_refusal(record, current_device()):
        yield reason


def implementations() -> tuple[Implementation, ...]:
    """Returns decoding with a dense latent cache, which also serves CPUs if Triton's interpreter is enabled."""
    return (
        triton_implementation(
            "tiled_attention",
            only=frozenset({"mla_decode"}),
            name="triton_latent",
            forward="paged_attention.latent.forward:forward",
            requires=triton_requires(head_dims=range(1, 641), handles=HANDLED_FIELDS, extra_reasons=_refusal_reasons),
            config=ConfigSpace(
                forward=PagedForward,
                public_fields=PUBLIC_FIELDS,
                heuristic=config.heuristic,
                candidates=config.candidates,
            ),
            priority=20,
            cases="ejkernel_triton.paged_attention.latent.cases:cases",
        ),
    )
