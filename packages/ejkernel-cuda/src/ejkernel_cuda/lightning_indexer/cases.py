"""Conformance cases of the kernels: float8_e4m3fn queries and keys of 128 channels, whose scores are exact.

Numbers are multiples of 1/4 up to 3, so that the tensor cores' sums, of about 14 bits, are exact too.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.modules.operations.cases.lightning_indexer import IndexerSizes, make_arrays
from ejkernel.modules.operations.cases.tables import Row, make_cases_of_rows
from ejkernel.modules.operations.lightning_indexer import LightningIndexerArguments
from ejkernel.ops.model import Case

SIZES = IndexerSizes(b=2, t=13, s=301, h=64, d=128, dtype=jnp.float8_e4m3fn)


def _scales(key: jax.Array) -> dict[str, Any]:
    """Returns scales of both signs of the keys, and scales of the queries."""
    query_key, sign_key, key = jax.random.split(key, 3)
    signs = jax.random.choice(sign_key, jnp.array([-1.0, 1.0]), (2, 301))
    return {
        "key_scales": signs * 2.0 ** jax.random.randint(key, (2, 301), -3, 1),
        "query_scales": 2.0 ** jax.random.randint(query_key, (2, 13, 64), -2, 2),
    }


_CASE_TABLE: tuple[Row[IndexerSizes], ...] = (
    ("64 heads in float8, scales of both signs", SIZES, lambda key: _scales(key) | {"top_k": 9}, ("key_scales",), ()),
    (
        "32 heads in float8, not rectified, negative scale",
        dataclasses.replace(SIZES, b=1, h=32, t=70),
        lambda key: {"top_k": 40, "rectify": False, "softmax_scale": -0.25, "sliding_window": (150, 0)},
        ("rectify",),
        ("awkward",),
    ),
    ("equal scores in float8", dataclasses.replace(SIZES, b=1, magnitude=0.1), lambda key: {"top_k": 200}, (), ()),
)


def cases() -> dict[str, tuple[Case, ...]]:
    """Returns the cases, by operation."""
    return {"lightning_indexer": make_cases_of_rows(LightningIndexerArguments, make_arrays, _CASE_TABLE)}
