"""Conformance cases of pages that are whole tiles of memory, which the operation's own cases do not have."""

import jax
import jax.numpy as jnp

from ejkernel.modules.operations.cases.lightning_indexer import IndexerSizes, make_arrays
from ejkernel.modules.operations.cases.tables import Row, make_cases_of_rows
from ejkernel.modules.operations.lightning_indexer import LightningIndexerArguments
from ejkernel.ops.model import Case

_CASE: Row[IndexerSizes] = (
    "whole tiles of int8 keys, a page missing, not rectified",
    IndexerSizes(b=3, t=2, s=32, h=3, d=128, dtype=jnp.bfloat16),
    lambda key: {
        "key": jax.random.randint(key, (9, 32, 128), -4, 5).astype(jnp.int8),
        "key_scales": 2.0 ** jax.random.randint(key, (9, 32), -3, 1),
        "block_tables": jnp.array([[2, 0, 5, 9], [3, 2, -1, 7], [8, 1, 4, 6]]),
        "kv_lens": jnp.array([90, 128, 1]),
        "rectify": False,
        "sliding_window": (100, 0),
        "top_k": 50,
    },
    ("key_scales", "block_tables", "rectify"),
    ("awkward",),
)


def cases() -> dict[str, tuple[Case, ...]]:
    """Returns the cases, by operation."""
    return {"lightning_indexer": make_cases_of_rows(LightningIndexerArguments, make_arrays, (_CASE,))}
