"""Paged softmax attention in Mosaic TPU: one kernel for caches that are only read and for those that are written to.

What the kernel needs, and what it does not do, is data here; nothing of Pallas is imported before a call.
"""

from collections.abc import Iterable
from typing import Any

from ejkernel.ops import ConfigSpace, Implementation, Requires
from ejkernel_pallas.toolchain import JAX
from ejkernel_pallas.tpu.interpret import devices
from ejkernel_pallas.tpu.paged_attention import limits, tiles

HANDLES = frozenset(
    {
        "causal",
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
        "page_attention",
        "prefill_page_attention",
        "ragged_page_attention_v2",
        "ragged_page_attention_v3",
        "unified_attention",
    }
)
"""The operations over pages of keys and values; others have no pages, or latents in them."""


def _reasons(record: Any) -> Iterable[str]:
    """What `Requires` has no word for."""
    return limits.reasons(record)


def implementations() -> tuple[Implementation, ...]:
    """One implementation."""
    return (
        Implementation(
            family="paged_attention",
            only=OPS,
            name="pallas_tpu",
            platform="pallas",
            backend="tpu",
            forward="ejkernel_pallas.tpu.paged_attention.forward:forward",
            requires=Requires(
                devices=devices(),
                modules=JAX,
                dtypes=frozenset({"bfloat16", "float32"}),
                head_dims=range(1, 257),
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
    )
