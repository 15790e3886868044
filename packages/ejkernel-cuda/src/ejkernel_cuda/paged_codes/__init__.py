"""Decode attention over paged caches of TurboQuant's codes in CUDA C++: a cache format of `paged_decode`'s kernel."""

from collections.abc import Iterable
from typing import Any

from ejkernel.families.paged_attention import pages as paged_cache
from ejkernel.families.paged_attention.rotation import key_head_dim
from ejkernel.ops import ConfigSpace, Implementation, current_device
from ejkernel_cuda.paged_codes import config
from ejkernel_cuda.paged_decode.config import PagedDecodeGrid
from ejkernel_cuda.requirements import cuda_requires

FORMATS = (
    (128, 0, 4, 4),
    (128, 128, 4, 4),
    (128, 128, 3, 4),
    (128, 128, 2, 3),
    (128, 128, 1, 2),
    (128, 0, 3, 3),
    (128, 0, 2, 2),
)
"""Head sizes, signs per key, bits of keys and bits of values that a kernel is compiled for."""

MAX_CACHE_BYTES = 2**36
"""The largest size of a cache array in bytes: offsets count pieces in 32 bits."""

HANDLED_FIELDS = frozenset(
    {
        *("code_bits", "key_signs", "key_norms", "value_norms", "key_codebook", "value_codebook"),
        *("rotation", "projection"),
        *("new_keys", "new_values", "new_key_signs", "new_key_norms", "new_value_norms"),
        *("num_seqs", "softmax_aux", "sliding_window", "logits_soft_cap"),
    }
)
"""Optional fields that the kernel honours; XLA writes new tokens first."""


def _refusal_reasons(record: Any) -> Iterable[str]:
    """Yields the reasons to refuse a record that `Requires` cannot express."""
    capability = current_device().compute_capability
    if capability is not None and capability >= 12.0:
        yield f"compute capability {capability}: the kernel needs more shared memory than the chip has"
    if record.code_bits is None:
        yield f"key_cache: got {record.key_pages.dtype}, the kernel reads codes"
        return
    rows, sequences = record.query.shape[0], record.kv_lens.shape[0]
    if record.query_start is not None and rows > sequences:
        yield f"queries: got {rows} rows of {sequences} sequences, the kernel serves at most one each"
    size = paged_cache.value_head_dim(record)
    signs = key_head_dim(record) - size
    if (size, signs, *record.code_bits) not in FORMATS:
        formats = ", ".join(f"{k} and {v} with {q} signs for {d}" for d, q, k, v in FORMATS)
        keys, values = record.code_bits
        yield (
            f"key_pages: keys of {size} codes of {keys} bits; wants a format that a kernel is compiled for instead of "
            f"{keys} and {values} with {signs} signs for {size}: {formats}"
        )
    if record.rotation is None:
        yield "rotation_matrix: got None, the kernel rotates queries and outputs itself"
    dtypes = {str(x.dtype) for x in (record.key_norms, record.value_norms)}
    if dtypes != {"bfloat16"}:
        yield f"key_cache: got norms of {' and '.join(sorted(dtypes))}, the kernel reads bfloat16"
    if max(record.key_pages.size, record.value_pages.size) >= MAX_CACHE_BYTES:
        yield "key_cache: got 64 GiB or more of keys or of values, the kernel reads less"


IMPLEMENTATIONS = (
    Implementation(
        family="paged_attention",
        name="cuda_codes",
        platform="cuda",
        forward="ejkernel_cuda.paged_codes.forward:forward",
        requires=cuda_requires(
            9.0, ("bfloat16",), handles=HANDLED_FIELDS, extra_reasons=_refusal_reasons, head_dims=range(128, 257)
        ),
        config=ConfigSpace(heuristic=config.heuristic, candidates=config.candidates, forward=PagedDecodeGrid),
        priority=25,
        only=frozenset({"ragged_page_attention_v2_turboquant", "ragged_page_attention_v3_turboquant"}),
        cases="ejkernel_cuda.paged_codes.cases:cases",
    ),
)
