"""Paged softmax attention in Mosaic TPU: one kernel for caches that are only read and for those that are written to.

What the kernel needs, and what it does not do, is data here; nothing of Pallas is imported before a call.
"""

import functools
from collections.abc import Iterable
from typing import Any

from ejkernel.modules.operations import configs
from ejkernel.ops import ConfigSpace, Implementation, Requires
from ejkernel_pallas.tpu.interpret import devices
from ejkernel_pallas.tpu.paged_attention import limits, tiles

COMMON = frozenset({"softmax_aux", "sliding_window", "logits_soft_cap"})
NEW = frozenset({"new_keys", "new_values"})

OPS: dict[str, tuple[type, frozenset[str]]] = {
    "page_attention": (configs.PageAttentionConfig, COMMON),
    "decode_attention": (configs.DecodeAttentionConfig, COMMON),
    "prefill_page_attention": (configs.PrefillPageAttentionConfig, COMMON),
    "unified_attention": (configs.UnifiedAttentionConfig, COMMON | {"causal"}),
    "chunked_prefill_paged_decode": (configs.ChunkedPrefillPagedDecodeConfig, COMMON | NEW | {"causal"}),
    "ragged_page_attention_v2": (configs.RaggedPageAttentionv2Config, COMMON | {"num_seqs", "compute_dtype"}),
    "ragged_page_attention_v3": (configs.RaggedPageAttentionv3Config, COMMON | NEW | {"num_seqs", "value_scale"}),
}
"""For every operation, the configuration its kernel reads, and the optional fields that its records can have."""


def _reasons(record: Any) -> Iterable[str]:
    """What `Requires` has no word for."""
    return limits.reasons(record)


def implementations() -> tuple[Implementation, ...]:
    """One implementation for every operation."""
    return tuple(_implementation(op, config, handles) for op, (config, handles) in OPS.items())


def _implementation(op: str, config: type, handles: frozenset[str]) -> Implementation:
    return Implementation(
        family="paged_attention",
        only=frozenset({op}),
        name="pallas_tpu",
        platform="pallas",
        backend="tpu",
        forward="ejkernel_pallas.tpu.paged_attention.forward:forward",
        requires=Requires(
            devices=devices(),
            dtypes=frozenset({"bfloat16", "float32"}),
            head_dims=range(1, 257),
            handles=handles,
            extra=_reasons,
        ),
        config=ConfigSpace(
            reads=tiles.READS,
            heuristic=functools.partial(tiles.heuristic, config=config),
            candidates=functools.partial(tiles.candidates, config=config),
        ),
        priority=10,
        cases="ejkernel_pallas.tpu.paged_attention.cases:cases",
    )
