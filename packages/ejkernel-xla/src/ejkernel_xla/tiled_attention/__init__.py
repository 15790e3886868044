"""Tiled softmax attention in XLA: forward and backward passes that visit only the tiles that are not masked."""

from ejkernel.families.tiled_attention import DROPOUT, FAMILY, MASKS, ROUNDING, SOFTMAX
from ejkernel.ops import ConfigSpace, Implementation, Requires
from ejkernel_xla.tiled_attention import tiles

OPS: dict[str, frozenset[str]] = {
    "flash_attention": MASKS | SOFTMAX | DROPOUT | ROUNDING | {"bias"},
    "blocksparse_attention": MASKS | SOFTMAX | {"bias", "pattern", "dropout_origin"},
    "flash_mla": (MASKS - {"kv_positions"}) | SOFTMAX | DROPOUT | {"bias", "logits_dtype"},
    "mla_decode": frozenset({"q_segment_ids", "kv_segment_ids", "q_positions", "sliding_window"}) | SOFTMAX,
    "scaled_dot_product_attention": MASKS | {"bias"},
}
"""For every operation, the optional fields that its records can have; the kernels honour all of them."""


def _implementation(op: str, handles: frozenset[str]) -> Implementation:
    return Implementation(
        op=op,
        name="xla",
        platform="xla",
        backend="any",
        forward="ejkernel_xla.tiled_attention.forward:forward",
        backward="ejkernel_xla.tiled_attention.backward:backward",
        gradients=frozenset(FAMILY.differentiable) & (handles | {"query", "key", "value"}),
        requires=Requires(
            devices=frozenset({"cpu", "gpu", "tpu"}),
            dtypes=frozenset({"float16", "bfloat16", "float32", "float64"}),
            handles=handles,
        ),
        config=ConfigSpace(
            reads=frozenset({"q_blocksize", "kv_blocksize"}), heuristic=tiles.heuristic, candidates=tiles.candidates
        ),
    )


IMPLEMENTATIONS = tuple(_implementation(op, handles) for op, handles in OPS.items())
