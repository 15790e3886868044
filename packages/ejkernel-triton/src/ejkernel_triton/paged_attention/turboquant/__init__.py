"""Decoding attention over caches of TurboQuant's codes in Triton: each program attends with the heads of one row."""

from collections.abc import Iterable
from typing import Any

from ejkernel.families.paged_attention import pages as paged_cache
from ejkernel.ops import ConfigSpace, Implementation
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.params import Direction
from ejkernel_triton.paged_attention.turboquant import config
from ejkernel_triton.requirements import triton_implementation, triton_requires

OPERATIONS = frozenset({"ragged_page_attention_v2_turboquant", "ragged_page_attention_v3_turboquant"})
"""The operations whose caches have codes."""

HANDLED_FIELDS = frozenset(
    {"num_seqs", "softmax_aux", "sliding_window", "logits_soft_cap", "code_bits", "key_signs", "key_norms"}
    | {"value_norms", "key_codebook", "value_codebook", "new_keys", "new_values", "new_key_signs", "new_key_norms"}
    | {"new_value_norms"}
)
"""Optional fields that the kernel honours."""

MAX_DECODE_ROWS_PER_SEQUENCE = 8
"""Query rows per sequence up to which the kernel comes first: it reads the keys once for each row."""


def _refusal_reasons(record: Any) -> Iterable[str]:
    """Yields the reasons to refuse a record that `Requires` cannot express."""
    if record.code_bits is None:
        yield "key_pages: got a cache of numbers, the kernel reads codes"
        return
    size = paged_cache.value_head_dim(record)
    if size & (size - 1) or not 16 <= size <= 256:
        yield f"queries: got a head size of {size}, the kernel reads powers of 2 from 16 to 256"
    projections = record.query.shape[-1] - size
    if projections and (projections & (projections - 1) or not 16 <= projections <= 256):
        yield f"qjl_projection: got {projections} rows, the kernel reads none or a power of 2 from 16 to 256"


def _priority(record: Any, device: DeviceInfo, direction: Direction) -> int:
    """Returns a priority above XLA's for few query rows per sequence, and below it for many."""
    return 10 if record.query.shape[0] <= MAX_DECODE_ROWS_PER_SEQUENCE * record.kv_lens.shape[0] else -1


def implementations() -> tuple[Implementation, ...]:
    """Returns the implementation, which also serves CPUs if Triton's interpreter is enabled."""
    return (
        triton_implementation(
            "paged_attention",
            only=OPERATIONS,
            name="triton_turboquant",
            forward="paged_attention.turboquant.forward:forward",
            requires=triton_requires(handles=HANDLED_FIELDS, extra_reasons=_refusal_reasons),
            config=ConfigSpace.of(config, forward=config.CodeSplits),
            priority=_priority,
            cases="ejkernel_triton.paged_attention.turboquant.cases:cases",
        ),
    )
