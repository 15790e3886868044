"""Selected attention in Triton, for GPUs from Ampere on and AMD's through HIP."""

from collections.abc import Iterable
from typing import Any

from ejkernel.families.selected_attention import FAMILY, blocks_per_query
from ejkernel.ops import ConfigSpace, Implementation
from ejkernel.ops.device import current_device
from ejkernel_triton.requirements import triton_implementation, triton_requires
from ejkernel_triton.selected_attention import config

HANDLED_FIELDS = frozenset(
    {
        "selected_blocks",
        "block_starts",
        "compressed_key",
        "compressed_value",
        "compressed_segment_ids",
        "q_segment_ids",
        "kv_segment_ids",
        "q_positions",
        "g_slc",
        "g_cmp",
        "g_swa",
        "window_size",
    }
)
"""Optional fields that the kernels honour."""

MAX_GROUP_SIZE = 64
"""The largest number of query heads per KV head: the heads of one query are the rows of a tile of scores."""


def _refusal_reasons(record: Any) -> Iterable[str]:
    """Yields the reasons to refuse a record that `Requires` cannot express."""
    if not blocks_per_query(record):
        yield "no block is selected"
    elif config.group_size(record) > MAX_GROUP_SIZE:
        yield f"{config.group_size(record)} query heads a KV head are more than {MAX_GROUP_SIZE}"
    elif shared_memory_refusal := config.shared_memory_refusal(record, current_device()):
        yield shared_memory_refusal


def implementations() -> tuple[Implementation, ...]:
    """Returns the implementation, which also serves CPUs if Triton's interpreter is enabled."""
    return (
        triton_implementation(
            "selected_attention",
            forward="selected_attention.forward:forward",
            backward="selected_attention.backward:backward",
            gradients=frozenset(FAMILY.differentiable),
            requires=triton_requires(head_dims=range(1, 257), handles=HANDLED_FIELDS, extra_reasons=_refusal_reasons),
            config=ConfigSpace.of(
                config, forward=config.SelectedForward, backward=config.SelectedBackward, kind=config.tuned_table_key
            ),
            invariant_to=frozenset({"batch", "padding", "chunking"}),
        ),
    )
