"""Conformance cases of the latent kernel, for 512 + 64 columns: partial tiles of heads and of lists, splits, sinks."""

import dataclasses

import jax
import jax.numpy as jnp

from ejkernel.modules.operations.cases import token_sparse_attention as base
from ejkernel.modules.operations.cases.tables import Row, make_cases_of_rows
from ejkernel.modules.operations.token_sparse_attention import TokenSparseAttentionArguments
from ejkernel.ops.model import Case

# Small, since the reference gathers a query's keys for every head.
SIZES = base.TokenSparseSizes(b=2, t=3, s=150, h=72, g=1, d=576, v=512, k=200, values_in_keys=True, dtype=jnp.bfloat16)


def _lists_of_all_lengths(key: jax.Array) -> jax.Array:
    """Returns [1, 21, 300]: query i lists 7 i keys, in every second entry."""
    entries = jnp.arange(300)
    indices = jax.random.randint(key, (1, 21, 300), 0, 150)
    return jnp.where((entries % 2 == 0) & (entries < 14 * jnp.arange(21)[:, None]), indices, -1)


_CASE_TABLE: tuple[Row[base.TokenSparseSizes], ...] = (
    (
        "512 + 64, sinks, lse",
        SIZES,
        lambda key: {"softmax_aux": 5 + jax.random.normal(key, (72,)), "return_lse": True, "softmax_scale": 0.04},
        ("softmax_aux",),
        (),
    ),
    (
        "512 + 64, lists of all lengths",
        dataclasses.replace(SIZES, b=1, t=21, h=2, k=300),
        lambda key: {"indices": _lists_of_all_lengths(key), "return_lse": True, "softmax_scale": -0.04},
        (),
        ("awkward",),
    ),
)


def cases() -> dict[str, tuple[Case, ...]]:
    """Returns the conformance cases of each operation, by its name."""
    table = make_cases_of_rows(TokenSparseAttentionArguments, base.make_arrays, _CASE_TABLE)
    return {"token_sparse_attention": table}
