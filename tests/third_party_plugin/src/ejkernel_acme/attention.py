"""What Acme serves of flash attention: the forward pass of some calls. XLA's backward pass takes it from there."""

from collections.abc import Iterator
from typing import Any

from ejkernel.ops import NO_CHOICE, Implementation, Requires

MOST_KEYS = 4096


def _too_long(record: Any) -> Iterator[str]:
    if record.key.shape[1] > MOST_KEYS:
        yield f"holds whole rows of scores, {record.key.shape[1]} keys are more than {MOST_KEYS}"


IMPLEMENTATION = Implementation(
    family="tiled_attention",
    name="acme",
    platform="acme",
    forward="ejkernel_acme.attention_kernel:forward",
    priority=50,
    requires=Requires(
        devices=frozenset({"cpu", "gpu", "tpu"}),
        dtypes=frozenset({"float32", "bfloat16"}),
        head_dims=range(1, 129),
        handles=frozenset({"causal", "sliding_window", "q_segment_ids", "kv_segment_ids"}),
        extra=_too_long,
    ),
    config=NO_CHOICE,
)
