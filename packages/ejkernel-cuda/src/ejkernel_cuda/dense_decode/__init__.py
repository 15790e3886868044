"""Decode attention over a dense cache in CUDA C++ with split-KV: the keys of a row are split over blocks and merged."""

from collections.abc import Iterable
from typing import Any

from ejkernel.ops import ConfigSpace, Implementation
from ejkernel_cuda.dense_decode import config
from ejkernel_cuda.requirements import decode_requires


def _refusal_reasons(record: Any) -> Iterable[str]:
    """Yields the reasons to refuse a record that `Requires` cannot express."""
    query, keys, values = record.query, record.key_pages, record.value_pages
    if record.block_tables is not None or record.query_start is not None or record.kv_layout != "pshd":
        yield "the cache is not dense: one row of keys for each query"
        return
    if {keys.dtype, values.dtype} != {query.dtype}:
        yield f"query is {query.dtype}, keys are {keys.dtype} and values {values.dtype}: wants one dtype"
    if query.shape[-1] % 8 or values.shape[-1] % 8:
        yield f"head sizes {query.shape[-1]} and {values.shape[-1]} are not multiples of 8"


IMPLEMENTATIONS = (
    Implementation(
        family="paged_attention",
        name="cuda",
        platform="cuda",
        forward="ejkernel_cuda.dense_decode.forward:forward",
        requires=decode_requires(
            handles={"kv_starts", "softmax_aux", "sliding_window", "logits_soft_cap"}, extra=_refusal_reasons
        ),
        config=ConfigSpace(
            heuristic=config.heuristic,
            candidates=config.candidates,
            forward=config.DecodeSplits,
            public_fields=config.PUBLIC_FIELDS,
        ),
        priority=30,
    ),
)
