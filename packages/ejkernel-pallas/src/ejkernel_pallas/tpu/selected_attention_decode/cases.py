"""Conformance cases of blocks and pages that are copied, which few of the operation's own cases have."""

import jax
import jax.numpy as jnp

from ejkernel.modules.operations.cases.native_sparse_attention import NativeSparseSizes, make_arrays
from ejkernel.modules.operations.cases.tables import Row, make_cases_of_rows
from ejkernel.modules.operations.native_sparse_attention import NativeSparseAttentionArguments
from ejkernel.ops.model import Case

_PAGES = NativeSparseSizes(
    b=2, t=2, h=8, g=4, d=128, v=128, block_size=32, gate_names=("g_cmp", "g_slc", "g_swa"), dtype=jnp.bfloat16
)
_SINGLE_HEAD = NativeSparseSizes(b=2, t=1, h=3, g=1, d=32, v=64, block_size=16, s=96, dtype=jnp.bfloat16)

_PAGED_TOKENS = {"key": 64, "value": 64, "compressed_key": 2, "compressed_value": 2}
"""Tokens of a page."""

_CASES: tuple[Row[NativeSparseSizes], ...] = (
    (
        "pairs of heads share words of pages, one missing",
        _PAGES,
        lambda key: {
            **{
                name: jax.random.normal(seed, (9, tokens, 4, 128)).astype(jnp.bfloat16)
                for (name, tokens), seed in zip(_PAGED_TOKENS.items(), jax.random.split(key, 4), strict=True)
            },
            "cu_seqlens": jnp.array([0, 1, 3]),
            "block_tables": jnp.array([[2, 0, 5, 9], [3, 1, -1, 7]]),
            "kv_lens": jnp.array([90, 211]),
            "block_indices": jax.random.randint(key, (2, 2, 4, 5), -1, 8),
            "window_size": 50,
        },
        ("block_tables", "window_size", "q_segment_ids", "compressed_segment_ids"),
        ("awkward",),
    ),
    (
        "tokens of a single head share words, dense",
        _SINGLE_HEAD,
        lambda key: {
            "block_indices": jax.random.randint(key, (2, 1, 1, 3), -1, 6),
        },
        (),
        ("awkward",),
    ),
)


def cases() -> dict[str, tuple[Case, ...]]:
    """Returns the cases, by operation."""
    return {"native_sparse_attention": make_cases_of_rows(NativeSparseAttentionArguments, make_arrays, _CASES)}
