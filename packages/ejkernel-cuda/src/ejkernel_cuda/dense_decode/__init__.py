"""Decode attention over a dense cache in CUDA C++ with split-KV: the keys of a row are split over blocks and merged."""

from collections.abc import Iterable
from typing import Any

from ejkernel.ops import ConfigSpace, Implementation
from ejkernel_cuda.dense_decode import config
from ejkernel_cuda.requirements import decode_requires


def _refusal_reasons(record: Any) -> Iterable[str]:
    """Yields the reasons to refuse a record that `Requires` cannot express."""
    query, keys, values = record.query, record.key_pages, record.value_pages
    if record.block_tables is not None:
        yield "block_tables: got a paged cache, the kernel reads a dense one with a row of keys for each query"
        return
    if record.query_start is not None or record.kv_layout != "pshd":
        yield "query: got packed rows or pages without a table, the kernel reads one row of keys for each query"
        return
    if {keys.dtype, values.dtype} != {query.dtype}:
        yield f"key: got {keys.dtype} and values of {values.dtype}, the kernel reads the query's {query.dtype}"
    if query.shape[-1] % 8 or values.shape[-1] % 8:
        sizes = f"{query.shape[-1]} and, of value, {values.shape[-1]}"
        yield f"query: got head dimension {sizes}, the kernel reads multiples of 8"


IMPLEMENTATIONS = (
    Implementation(
        family="paged_attention",
        name="cuda",
        platform="cuda",
        forward="ejkernel_cuda.dense_decode.forward:forward",
        requires=decode_requires(
            handles={"kv_starts", "softmax_aux", "sliding_window", "logits_soft_cap"}, extra_reasons=_refusal_reasons
        ),
        config=ConfigSpace.of(config, forward=config.DecodeSplits),
        priority=30,
    ),
)
