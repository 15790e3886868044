"""Token-sparse attention in Triton, for GPUs from Ampere on and AMD's through HIP."""

import math
from collections.abc import Iterable
from typing import Any

from ejkernel.families.token_sparse_attention import FAMILY
from ejkernel.ops import ConfigSpace, Implementation
from ejkernel.ops.device import DeviceInfo, current_device
from ejkernel.ops.params import Direction
from ejkernel_triton.requirements import triton_implementation, triton_requires
from ejkernel_triton.token_sparse_attention import config

MAX_HEAD_DIM = 1024
"""The largest rows that the tiles of a program hold."""


def _priority(record: Any, device: DeviceInfo, direction: Direction) -> int:
    """Returns the place in the order of choice: after XLA's where XLA is faster.

    On an H200, 256 queries that list 2048 float32 keys of 576 take 65 ms forward and 770 with gradients, as the kernels
    spill, and 10.5 and 38 in XLA; a single bfloat16 query, two programs, takes 0.30 ms and 0.15 in XLA.
    """
    spills = record.query.dtype.itemsize > 2 and config.has_wide_rows(record)
    return -1 if spills or math.prod(record.query.shape[:2]) == 1 else 10


def shared_memory_refusal_reasons(record: Any) -> Iterable[str]:
    """Yields the reasons to refuse a record that `Requires` cannot express."""
    if shared_memory_refusal := config.shared_memory_refusal(record, current_device()):
        yield shared_memory_refusal


def implementations() -> tuple[Implementation, ...]:
    """Returns the implementation, which also serves CPUs if Triton's interpreter is enabled."""
    return (
        triton_implementation(
            "token_sparse_attention",
            forward="token_sparse_attention.forward:forward",
            backward="token_sparse_attention.backward:backward",
            gradients=frozenset(FAMILY.differentiable),
            priority=_priority,
            requires=triton_requires(
                head_dims=range(1, MAX_HEAD_DIM + 1),
                handles={"value", "softmax_aux", "lse_cotangent"},
                extra_reasons=shared_memory_refusal_reasons,
            ),
            config=ConfigSpace.of(config, forward=config.SparseForward, backward=config.SparseBackward),
            invariant_to=frozenset({"batch", "padding", "chunking"}),
            invariant_priority=10,
        ),
    )
