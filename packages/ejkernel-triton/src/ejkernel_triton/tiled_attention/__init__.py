"""Tiled softmax attention in Triton, for GPUs from Ampere on and AMD's through HIP."""

from collections.abc import Iterable
from typing import Any

from ejkernel.families.tiled_attention import DROPOUT_FIELDS, MASK_FIELDS, NUMERICS_FIELDS, SOFTMAX_FIELDS
from ejkernel.families.tiled_attention.block_maps import pattern_refusals
from ejkernel.families.tiled_attention.kinds import tuning_key_of_large_calls
from ejkernel.ops import ConfigSpace, Implementation
from ejkernel_triton.requirements import triton_implementation, triton_requires
from ejkernel_triton.tiled_attention import config

HANDLED_FIELDS = MASK_FIELDS | SOFTMAX_FIELDS | DROPOUT_FIELDS | NUMERICS_FIELDS | {"bias", "pattern", "lse_cotangent"}
"""Optional fields that the kernels honour."""


def _refusal_reasons(record: Any) -> Iterable[str]:
    """Yields the reasons to refuse a record that `Requires` cannot express."""
    if str(record.logits_dtype) not in ("float32", "bfloat16", "float16"):
        yield f"logits_dtype {record.logits_dtype} is not among bfloat16, float16, float32"
    yield from pattern_refusals(record)


def implementations() -> tuple[Implementation, ...]:
    """Returns the implementation, which also serves CPUs if Triton's interpreter is enabled."""
    implementation = triton_implementation(
        "tiled_attention",
        forward="tiled_attention.forward:forward",
        backward="tiled_attention.backward:backward",
        gradients=frozenset({"query", "key", "value", "bias", "softmax_aux"}),
        requires=triton_requires(head_dims=range(1, 257), handles=HANDLED_FIELDS, extra_reasons=_refusal_reasons),
        config=ConfigSpace(
            heuristic=config.heuristic,
            candidates=config.candidates,
            kind=tuning_key_of_large_calls,
            forward=config.TritonForward,
            backward=config.TritonBackward,
            batch_invariant=config.batch_invariant,
            public_fields=config.PUBLIC_FIELDS,
        ),
        invariant_to=frozenset({"batch", "padding", "chunking"}),
        invariance_limits=config.invariance_limits,
    )
    return (implementation,)
