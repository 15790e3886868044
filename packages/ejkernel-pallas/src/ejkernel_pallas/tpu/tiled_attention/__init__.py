"""Tiled softmax attention in Mosaic TPU.

What the kernels need, and what they do not do, is data here; nothing of Pallas is imported before a call.
"""

from collections.abc import Iterable
from typing import Any

from ejkernel.families.tiled_attention import DROPOUT, FAMILY, MASKS, SOFTMAX
from ejkernel.ops import ConfigSpace, Implementation, Requires
from ejkernel_pallas.tpu.interpret import devices
from ejkernel_pallas.tpu.tiled_attention import patterns, tiles

OPS: dict[str, frozenset[str]] = {
    "flash_attention": MASKS | SOFTMAX | DROPOUT | {"bias", "precision"},
    "blocksparse_attention": MASKS | SOFTMAX | {"bias", "pattern", "dropout_origin"},
    "scaled_dot_product_attention": MASKS | {"bias"},
}
"""For every operation, the optional fields that its records can have and the kernels honour."""


def _reasons(record: Any) -> Iterable[str]:
    """What `Requires` has no word for."""
    if not (record.query.size and record.key.size and record.value.size):
        yield "an array is empty"
        return
    yield from patterns.reasons(record)
    yield from tiles.reasons(record)


def implementations() -> tuple[Implementation, ...]:
    """One implementation for every operation."""
    return tuple(_implementation(op, handles) for op, handles in OPS.items())


def _implementation(op: str, handles: frozenset[str]) -> Implementation:
    return Implementation(
        op=op,
        name="pallas_tpu",
        platform="pallas",
        backend="tpu",
        forward="ejkernel_pallas.tpu.tiled_attention.forward:forward",
        backward="ejkernel_pallas.tpu.tiled_attention.backward:backward",
        gradients=frozenset(FAMILY.differentiable) & (handles | {"query", "key", "value"}),
        requires=Requires(
            devices=devices(),
            dtypes=frozenset({"bfloat16", "float32"}),
            head_dims=range(1, 257),
            handles=handles,
            extra=_reasons,
        ),
        config=ConfigSpace(reads=tiles.READS, heuristic=tiles.heuristic, candidates=tiles.candidates, kind=tiles.kind),
        priority=10,
        tuned="ejkernel_pallas:tuned",
    )
