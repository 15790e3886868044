"""The lightning indexer in CUDA C++ with float8_e4m3fn queries and keys: WGMMA scores on Hopper, and a selection."""

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp

from ejkernel.ops import ConfigSpace, Implementation
from ejkernel.ops.device import current_device
from ejkernel_cuda.lightning_indexer import config
from ejkernel_cuda.requirements import cuda_requires

HOPPER_COMPUTE_CAPABILITY = 9.0
"""The compute capability whose instructions the kernel of the scores consists of; no later chip has them."""
HEADS = (32, 64)
"""The numbers of heads that the kernel is compiled for."""
MAX_TOP_K = 4096
"""The most keys that a block selects."""


def _refusal_reasons(record: Any) -> Iterable[str]:
    """Yields the reasons to refuse a record that `Requires` cannot express."""
    if record.key.dtype != jnp.float8_e4m3fn:
        yield f"key: got dtype {record.key.dtype}, the kernel reads float8_e4m3fn"
    if record.query.shape[2] not in HEADS:
        yield f"query: got {record.query.shape[2]} heads, the kernel is compiled for {HEADS[0]} and {HEADS[1]}"
    if record.top_k > MAX_TOP_K:
        yield f"top_k: got {record.top_k}, the kernel selects at most {MAX_TOP_K}"
    capability = current_device().compute_capability
    if capability is not None and int(capability) != int(HOPPER_COMPUTE_CAPABILITY):
        yield f"compute capability {capability}: the kernel is compiled for {HOPPER_COMPUTE_CAPABILITY} alone"


IMPLEMENTATIONS = (
    Implementation(
        family="lightning_indexer",
        name="cuda_fp8",
        platform="cuda",
        forward="ejkernel_cuda.lightning_indexer.forward:forward",
        requires=cuda_requires(
            HOPPER_COMPUTE_CAPABILITY,
            {"float8_e4m3fn"},
            handles={"key_scales", "rectify"},
            extra_reasons=_refusal_reasons,
            head_dims=range(config.CHANNELS, config.CHANNELS + 1),
        ),
        config=ConfigSpace.of(config, forward=config.KeySplits),
        # After all others: its sums have fewer bits than theirs (docs/lab/fp8_indexer.md).
        priority=-1,
        cases="ejkernel_cuda.lightning_indexer.cases:cases",
    ),
)
