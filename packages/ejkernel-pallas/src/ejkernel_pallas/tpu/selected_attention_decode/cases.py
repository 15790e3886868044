"""Conformance cases of blocks and pages that are copied, which few of the operation's own cases have."""

import jax
import jax.numpy as jnp

from ejkernel.modules.operations.cases.native_sparse_attention import NativeSparseSizes, make_arrays
from ejkernel.modules.operations.cases.tables import Row, make_cases_of_rows
from ejkernel.modules.operations.native_sparse_attention import NativeSparseAttentionArguments
from ejkernel.ops.model import Case

GATES = ("g_slc", "g_swa")
_PAGES = NativeSparseSizes(b=2, t=2, h=8, g=4, d=128, v=128, block_size=32, gate_names=GATES, dtype=jnp.bfloat16)
_SINGLE_HEAD = NativeSparseSizes(b=2, t=1, h=3, g=1, d=32, v=64, block_size=16, s=96, dtype=jnp.bfloat16)

_CASES: tuple[Row[NativeSparseSizes], ...] = (
    (
        "pairs of heads share words of pages, one missing",
        _PAGES,
        lambda key: {
            **{
                name: jax.random.normal(seed, (9, 64, 4, 128)).astype(jnp.bfloat16)
                for name, seed in zip(("key", "value"), jax.random.split(key), strict=True)
            },
            "block_tables": jnp.array([[2, 0, 5, 9], [3, 1, -1, 7]]),
            "kv_lens": jnp.array([90, 211]),
            "block_indices": jax.random.randint(key, (2, 2, 4, 5), -1, 8),
            "window_size": 50,
        },
        ("block_tables", "window_size"),
        ("awkward",),
    ),
    (
        "tokens of a single head share words, dense",
        _SINGLE_HEAD,
        lambda key: {
            "kv_lens": jnp.array([96, 41]),
            "block_indices": jax.random.randint(key, (2, 1, 1, 3), -1, 6),
        },
        ("kv_segment_ids",),
        ("awkward",),
    ),
)


def cases() -> dict[str, tuple[Case, ...]]:
    """Returns the cases, by operation."""
    return {"native_sparse_attention": make_cases_of_rows(NativeSparseAttentionArguments, make_arrays, _CASES)}
