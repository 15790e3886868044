"""Conformance cases of fields that the operation's own cases have only together with pages or blocks."""

import jax
import jax.numpy as jnp

from ejkernel.modules.operations.cases.lightning_indexer import IndexerSizes, make_arrays
from ejkernel.modules.operations.cases.tables import Row, make_cases_of_rows
from ejkernel.modules.operations.lightning_indexer import LightningIndexerArguments
from ejkernel.ops.model import Case

_CASE: Row[IndexerSizes] = (
    "scaled keys of 8 bits in a window, not rectified",
    IndexerSizes(b=2, t=13, s=37, h=3, d=20, dtype=jnp.bfloat16),
    lambda key: {
        "key": jax.random.randint(key, (2, 37, 20), -12, 13).astype(jnp.int8),
        "key_scales": 2.0 ** jax.random.randint(key, (2, 37), -3, 1),
        "rectify": False,
        "sliding_window": (20, 0),
        "top_k": 5,
    },
    ("key_scales", "rectify"),
    ("awkward",),
)


def cases() -> dict[str, tuple[Case, ...]]:
    """Returns the cases, by operation."""
    return {"lightning_indexer": make_cases_of_rows(LightningIndexerArguments, make_arrays, (_CASE,))}
