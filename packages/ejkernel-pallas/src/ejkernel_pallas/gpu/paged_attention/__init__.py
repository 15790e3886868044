"""Paged attention in Mosaic GPU, for NVIDIA's Hopper.

The requirements of the kernel are data in this module, which imports nothing of Pallas.
"""

from typing import Any

from ejkernel.ops import ConfigSpace, Implementation
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.params import Direction
from ejkernel_pallas.gpu.paged_attention import config, spec
from ejkernel_pallas.gpu.requirements import hopper_requires

HANDLES = frozenset({"new_keys", "new_values", "num_seqs", "sliding_window", "causal", "value_scale"})
"""Optional fields that the kernel honours."""

MIN_MEAN_PREFILL_ROWS = 16
"""The mean number of query rows per sequence from which on a call counts as prefill.

In a mixed batch, 4 chunks of 512 tokens and 60 decoding sequences have a mean of 33, and take an H200 1.08 ms, where
Triton's kernel takes 1.55.
"""


def _priority(record: Any, device: DeviceInfo, direction: Direction) -> int:
    """Returns a priority above Triton's for many query tokens per sequence; in decoding it is 7% slower than
    Triton's.
    """
    return 20 if record.query.shape[0] >= MIN_MEAN_PREFILL_ROWS * record.kv_lens.shape[0] else -1


def implementations() -> tuple[Implementation, ...]:
    """Returns the implementation."""
    return (
        Implementation(
            family="paged_attention",
            name="mosaic_gpu",
            platform="pallas",
            forward="ejkernel_pallas.gpu.paged_attention.forward:forward",
            requires=hopper_requires(handles=HANDLES, find_refusal_reasons=spec.refusal_reasons),
            config=ConfigSpace.of(
                config, forward=config.HopperPaged, fixed_if_invariant=("split_keys", "split_doublings")
            ),
            priority=_priority,
            # Prefill and decoding have the same bits in the block, so that one kernel family serves all calls there.
            invariant_to=frozenset({"batch", "padding", "chunking", "pages"}),
            invariant_priority=20,
            cases="ejkernel_pallas.gpu.paged_attention.cases:cases",
        ),
    )
