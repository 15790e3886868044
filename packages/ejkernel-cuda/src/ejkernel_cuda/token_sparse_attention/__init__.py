"""Token-sparse attention to latent keys in CUDA C++ for Hopper: a warpgroup gathers keys, and two share 64 heads."""

import math
from collections.abc import Iterable
from typing import Any

from ejkernel.ops import ConfigSpace, Implementation
from ejkernel.ops.device import DeviceInfo, current_device
from ejkernel.ops.params import Direction
from ejkernel_cuda.requirements import cuda_requires
from ejkernel_cuda.token_sparse_attention import config

HOPPER_COMPUTE_CAPABILITY = 9.0
"""The compute capability whose instructions the kernel consists of; no later chip has them."""


def _refusal_reasons(record: Any) -> Iterable[str]:
    """Yields the reasons to refuse a record that `Requires` cannot express."""
    columns, values = record.query.shape[3], record.value_size
    if (columns, values) != (config.ROW_SIZE, config.VALUE_SIZE):
        wants = f"{config.ROW_SIZE} and {config.VALUE_SIZE}"
        yield f"keys have {columns} columns and values {values}; the kernel wants {wants}"
    if record.key.shape[2] != 1:
        yield f"key: got {record.key.shape[2]} heads, the kernel reads one"
    capability = current_device().compute_capability
    if capability is not None and int(capability) != int(HOPPER_COMPUTE_CAPABILITY):
        yield f"compute capability {capability}: the kernel is compiled for {HOPPER_COMPUTE_CAPABILITY} alone"


def _priority(record: Any, device: DeviceInfo, direction: Direction) -> int:
    """Returns a priority above Triton's 10, but for a single query, which is faster in XLA.

    On an H200, 4096 queries of 128 heads take 4.0 ms and 8.8 in Triton, 64 of 16 heads 0.053 ms and 0.119, two of 128
    heads 0.033 ms and 0.053 in XLA, and one 0.034 ms and 0.022 in XLA (docs/lab/token_sparse_attention_gpu.md).
    """
    return -1 if math.prod(record.query.shape[:2]) == 1 else 20


IMPLEMENTATIONS = (
    Implementation(
        family="token_sparse_attention",
        name="cuda_latent",
        platform="cuda",
        forward="ejkernel_cuda.token_sparse_attention.forward:forward",
        requires=cuda_requires(
            HOPPER_COMPUTE_CAPABILITY, {"bfloat16"}, handles={"softmax_aux"}, extra_reasons=_refusal_reasons
        ),
        config=ConfigSpace.of(config, forward=config.LatentSplits),
        priority=_priority,
        cases="ejkernel_cuda.token_sparse_attention.cases:cases",
    ),
)
