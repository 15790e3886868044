"""The lightning indexer in Triton, for GPUs from Ampere on and AMD's through HIP."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

from ejkernel.families.lightning_indexer import with_wide_query
from ejkernel.ops import ConfigSpace, Implementation
from ejkernel.ops.device import DeviceInfo, current_device
from ejkernel.ops.params import Direction
from ejkernel_triton.lightning_indexer import config
from ejkernel_triton.requirements import DTYPES, triton_implementation, triton_requires

MAX_HEAD_DIM = 256
"""The largest rows of the tiles."""
MAX_HEADS = 256
"""The most heads: a tile has all heads of a query."""
MAX_TOP_K = 4096
"""The most keys that a program sorts."""


def _priority(record: Any, device: DeviceInfo, direction: Direction) -> int:
    """Returns the place in the order of choice: after XLA's for a single query.

    On an H200, one query selects 2048 of 131072 keys in 0.164 ms, and in 0.161 in XLA; 16 rows of one query do in 0.298
    and 2.007 (benchmarks/results/lightning_indexer_gpu.md).
    """
    return -1 if math.prod(record.query.shape[:2]) == 1 else 10


def _refusal_reasons(record: Any) -> Iterable[str]:
    """Yields the reasons to refuse a record that `Requires` cannot express."""
    record = with_wide_query(record)
    heads = record.query.shape[2]
    if heads > MAX_HEADS:
        yield f"query: got {heads} heads, the kernels have at most {MAX_HEADS}"
    elif reason := config.shared_memory_refusal(record, current_device()):
        yield reason
    if record.top_k > MAX_TOP_K:
        yield f"top_k: got {record.top_k}, the kernels select at most {MAX_TOP_K}"


def implementations() -> tuple[Implementation, ...]:
    """Returns the implementation, which also serves CPUs if Triton's interpreter is enabled."""
    return (
        triton_implementation(
            "lightning_indexer",
            forward="lightning_indexer.forward:forward",
            priority=_priority,
            requires=dataclasses.replace(
                triton_requires(
                    head_dims=range(1, MAX_HEAD_DIM + 1),
                    handles={"key_scales", "rectify"},
                    extra_reasons=_refusal_reasons,
                ),
                dtypes=DTYPES | {"float8_e4m3fn"},
            ),
            config=ConfigSpace.of(config, forward=config.IndexerTiles),
            invariant_to=frozenset({"batch", "padding", "chunking"}),
            invariant_priority=10,
            cases="ejkernel_triton.lightning_indexer.cases:cases",
        ),
    )
