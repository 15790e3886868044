"""Decode attention over paged caches of 16 or 8 bits per element in CUDA C++, by a persistent kernel (Stream-K)."""

from collections.abc import Iterable
from typing import Any

from ejkernel.families.paged_attention import pages as paged_cache
from ejkernel.ops import ConfigSpace, Implementation
from ejkernel_cuda.paged_decode import config
from ejkernel_cuda.requirements import decode_requires

EIGHT_BIT_DTYPES = ("float8_e4m3fn", "float8_e5m2", "int8")
"""Cache dtypes that the kernels support in addition to the query's dtype."""

HANDLED_FIELDS = frozenset({"kv_starts", "num_seqs", "softmax_aux", "causal", "sliding_window", "logits_soft_cap"}) | {
    *("new_keys", "new_values", "value_scale")
}
"""Optional fields that the kernels honour; new tokens are written first, in place if the cache is donated."""

ASYNC_COPY_BYTES = 16
"""Bytes per copy into shared memory: rows of the cache must be aligned to it."""

MAX_CACHE_BYTES = 2**36
"""The largest size of a cache array in bytes: offsets count pieces in 32 bits."""


def _refusal_reasons(record: Any) -> Iterable[str]:
    """Yields the reasons to refuse a record that `Requires` cannot express."""
    query, keys = record.query, record.key_pages
    values = keys if record.value_pages is None else record.value_pages
    if record.kv_layout == paged_cache.LATENT_LAYOUT:
        yield "kv_cache: got a cache of latent vectors, the kernel reads keys and values"
        return
    if keys.dtype != values.dtype or str(keys.dtype) not in (str(query.dtype), *EIGHT_BIT_DTYPES):
        dtypes = f"{keys.dtype} and values of {values.dtype}"
        yield f"key_cache: got {dtypes}, the kernel reads the query's {query.dtype} and dtypes of 8 bits"
    rows, sequences = query.shape[0], record.kv_lens.shape[0]
    if record.query_start is not None and rows > sequences:
        yield f"queries: got {rows} rows of {sequences} sequences, the kernel serves at most one each"
    sizes = query.shape[-1], paged_cache.value_head_dim(record), keys.shape[-1], values.shape[-1]
    if any(size * keys.dtype.itemsize % ASYNC_COPY_BYTES for size in sizes):
        row_sizes = f"{sizes[0]} and, of values, {sizes[1]} elements of {keys.dtype}"
        yield f"key_cache: got rows of {row_sizes}, the kernel reads multiples of {ASYNC_COPY_BYTES} bytes"
    if max(keys.size, values.size) * keys.dtype.itemsize >= MAX_CACHE_BYTES:
        yield "key_cache: got 64 GiB or more of keys or of values, the kernel reads less"


IMPLEMENTATIONS = (
    Implementation(
        family="paged_attention",
        name="cuda_paged",
        platform="cuda",
        forward="ejkernel_cuda.paged_decode.forward:forward",
        requires=decode_requires(handles=HANDLED_FIELDS, extra_reasons=_refusal_reasons),
        config=ConfigSpace(heuristic=config.heuristic, candidates=config.candidates, forward=config.PagedDecodeGrid),
        priority=25,
        cases="ejkernel_cuda.paged_decode.cases:cases",
    ),
)
