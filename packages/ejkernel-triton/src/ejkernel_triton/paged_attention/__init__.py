"""Paged softmax attention in Triton, for GPUs from Ampere on and AMD's through HIP."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from ejkernel.families.paged_attention import pages as paged_cache
from ejkernel.ops import ConfigSpace, Implementation
from ejkernel.ops.device import current_device
from ejkernel_triton.paged_attention import config, latent
from ejkernel_triton.paged_attention.fixed_splits import config as fixed_splits
from ejkernel_triton.requirements import triton_implementation, triton_requires

HANDLED_FIELDS = frozenset(
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

CACHE_DTYPES = ("float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2", "int8")
"""Dtypes of caches that the kernels read."""

FLOAT8_E4M3 = "float8_e4m3fn"
"""The dtype of caches that Triton reads on NVIDIA's GPUs only from compute capability 8.9 on."""


def _refusal_reasons(record: Any) -> Iterable[str]:
    """Yields the reasons to refuse a record that `Requires` cannot express."""
    cache_dtype, head_dim = str(record.key_pages.dtype), record.query.shape[-1]
    if cache_dtype not in CACHE_DTYPES:
        yield f"key_pages: got {cache_dtype}, the kernel reads {', '.join(CACHE_DTYPES)}"
    device = current_device()
    if cache_dtype == FLOAT8_E4M3 and device.vendor == "nvidia" and (device.compute_capability or 0) < 8.9:
        yield f"key_pages: Triton reads {FLOAT8_E4M3} from compute capability 8.9 on, and this is {device.kind}"
    if record.compute_dtype is not None and str(record.compute_dtype) not in CACHE_DTYPES[:3]:
        yield f"compute_dtype: got {record.compute_dtype}, the kernel computes in {', '.join(CACHE_DTYPES[:3])}"
    if record.shared_prefix is not None and record.kv_starts is not None:
        yield "kv_starts: the kernel does not serve first keys of sequences together with shared_prefix"
    if record.latent is None and (largest := max(head_dim, paged_cache.value_head_dim(record))) > 256:
        yield f"query: got a head dimension of {largest} (of keys or values), the kernel has at most 256"
    if record.latent is not None and (record.latent[0] > 512 or head_dim - record.latent[0] > 128):
        yield (
            f"key_pages: got {record.latent[0]} latent and {head_dim - record.latent[0]} rotary columns, "
            "the kernel has at most 512 and 128"
        )
    elif reason := config.shared_memory_refusal(record, device):
        yield reason


def implementations() -> tuple[Implementation, ...]:
    """Returns the implementations of the family and of the dense latent cache, which also serve CPUs if interpreted."""
    space = ConfigSpace.of(config, forward=config.PagedForward, fixed_if_invariant=("block_kv", "batch_invariant"))
    return (
        triton_implementation(
            "paged_attention",
            forward="paged_attention.forward:forward",
            requires=triton_requires(head_dims=range(1, 641), handles=HANDLED_FIELDS, extra_reasons=_refusal_reasons),
            config=dataclasses.replace(space, batch_invariant=fixed_splits.batch_invariant),
            invariant_to=frozenset({"batch", "padding", "chunking", "pages"}),
            invariance_limits=fixed_splits.invariance_limits,
        ),
        *latent.implementations(),
    )
