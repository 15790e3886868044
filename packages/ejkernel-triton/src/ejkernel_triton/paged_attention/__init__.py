"""Paged softmax attention in Triton, for GPUs from Ampere on and AMD's through HIP."""

from collections.abc import Iterable
from typing import Any

from ejkernel.families.paged_attention import pages as paged_cache
from ejkernel.ops import ConfigSpace, Implementation
from ejkernel.ops.device import current_device
from ejkernel_triton.paged_attention import config, latent
from ejkernel_triton.requirements import triton_implementation, triton_requires

HANDLES = frozenset(
    {
        "kv_starts",
        "num_seqs",
        "softmax_aux",
        "alibi_slopes",
        "qq_bias",
        "new_keys",
        "new_values",
        "causal",
        "sliding_window",
        "logits_soft_cap",
        "compute_dtype",
        "value_scale",
        "latent",
        "shared_prefix",
        "chunk_size",
    }
)
"""Optional fields that the kernels honour."""

CACHES = ("float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2", "int8")


FLOAT8 = "float8_e4m3fn"


def _reasons(record: Any) -> Iterable[str]:
    """Yields the reasons to refuse a record that `Requires` cannot express."""
    if str(record.key_pages.dtype) not in CACHES:
        yield f"caches of {record.key_pages.dtype} are not among {', '.join(CACHES)}"
    device = current_device()
    if str(record.key_pages.dtype) == FLOAT8 and device.vendor == "nvidia" and (device.compute_capability or 0) < 8.9:
        yield f"caches of {FLOAT8}, which Triton reads from compute capability 8.9 on; this is {device.kind}"
    if record.compute_dtype is not None and str(record.compute_dtype) not in CACHES[:3]:
        yield f"compute_dtype {record.compute_dtype} is not among {', '.join(CACHES[:3])}"
    if record.shared_prefix is not None and record.kv_starts is not None:
        yield "a shared prefix together with first keys of sequences"
    if record.latent is None and max(record.query.shape[-1], paged_cache.value_size(record)) > 256:
        yield f"a head dimension of {record.query.shape[-1]} is more than 256"
    if record.latent is not None and (record.latent[0] > 512 or record.query.shape[-1] - record.latent[0] > 128):
        yield f"a latent size of {record.latent[0]} or its rotary part is more than 512 and 128"
    elif too_large := config.too_large(record, device):
        yield too_large


def implementations() -> tuple[Implementation, ...]:
    """Returns the implementations of the family and of the dense latent cache, which also serve CPUs if interpreted."""
    return (
        triton_implementation(
            "paged_attention",
            forward="paged_attention.forward:forward",
            requires=triton_requires(head_dims=range(1, 641), handles=HANDLES, extra=_reasons),
            config=ConfigSpace(
                forward=config.PagedForward,
                public_fields=config.PUBLIC_FIELDS,
                heuristic=config.heuristic,
                candidates=config.candidates,
            ),
        ),
        *latent.implementations(),
    )
