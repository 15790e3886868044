"""Paged softmax attention in Triton, for GPUs from Ampere on and AMD's through HIP."""

from collections.abc import Iterable
from typing import Any

from ejkernel.ops import ConfigSpace, Implementation, Requires
from ejkernel.planning import paged_cache
from ejkernel_triton.launch import interpreting
from ejkernel_triton.paged_attention import config

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
    }
)
"""Optional fields that the kernels honour."""

CACHES = ("float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2", "int8")


def _reasons(record: Any) -> Iterable[str]:
    """What `Requires` has no word for."""
    arrays = (record.query, record.key_pages, record.kv_lens, record.value_pages)
    if not all(array.size for array in arrays if array is not None):
        yield "an array is empty"
    if str(record.key_pages.dtype) not in CACHES:
        yield f"caches of {record.key_pages.dtype} are not among {', '.join(CACHES)}"
    if record.compute_dtype is not None and str(record.compute_dtype) not in CACHES[:3]:
        yield f"compute_dtype {record.compute_dtype} is not among {', '.join(CACHES[:3])}"
    group = record.query.shape[1] // max(1, paged_cache.kv_heads(record))
    if group > 128:
        yield f"{group} query heads a KV head are more than 128"


def implementations() -> tuple[Implementation, ...]:
    """One implementation; for the CPU too where Triton's interpreter is switched on."""
    interpreted = interpreting()
    return (
        Implementation(
            family="paged_attention",
            name="triton",
            platform="triton",
            backend="gpu",
            forward="ejkernel_triton.paged_attention.forward:forward",
            requires=Requires(
                devices=frozenset({"nvidia", "amd"}) | ({"cpu"} if interpreted else frozenset()),
                modules=("triton",) if interpreted else ("triton", "jax_triton"),
                min_compute_capability=8.0,
                dtypes=frozenset({"float16", "bfloat16", "float32"}),
                head_dims=range(1, 257),
                handles=HANDLES,
                extra=_reasons,
            ),
            config=ConfigSpace(
                forward=config.PagedForward,
                faces=config.FACES,
                heuristic=config.heuristic,
                candidates=config.candidates,
            ),
            priority=10,
        ),
    )
