"""Paged attention in Mosaic GPU, for NVIDIA's Hopper.

What the kernel needs, and what it does not do, is data here; nothing of Pallas is imported before a call.
"""

from typing import Any

from ejkernel.ops import ConfigSpace, Implementation
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.params import Direction
from ejkernel_pallas.gpu.paged_attention import config, spec
from ejkernel_pallas.gpu.requirements import hopper_requires

HANDLES = frozenset({"new_keys", "new_values", "num_seqs", "sliding_window", "causal", "value_scale"})
"""Optional fields that the kernel honours."""

PREFILL_ROWS = 16
"""Query rows a sequence from which on calls are prefill chosen by rule.

Of a mixed batch it is the mean: 4 chunks of 512 tokens beside 60 sequences that decode have 33, and take an H200
1.08 ms where Triton's kernel takes 1.55.
"""


def _priority(record: Any, device: DeviceInfo, direction: Direction) -> int:
    """Before Triton's where sequences have many query tokens; its decoding is 7% slower, so that XLA's comes first."""
    return 20 if record.query.shape[0] >= PREFILL_ROWS * record.kv_lens.shape[0] else -1


def implementations() -> tuple[Implementation, ...]:
    """Returns one implementation."""
    return (
        Implementation(
            family="paged_attention",
            name="mosaic_gpu",
            platform="pallas",
            forward="ejkernel_pallas.gpu.paged_attention.forward:forward",
            requires=hopper_requires(handles=HANDLES, extra=spec.reasons),
            config=ConfigSpace(
                forward=config.HopperPaged,
                public_fields=config.PUBLIC_FIELDS,
                heuristic=config.heuristic,
                candidates=config.candidates,
            ),
            priority=_priority,
            cases="ejkernel_pallas.gpu.paged_attention.cases:cases",
        ),
    )
