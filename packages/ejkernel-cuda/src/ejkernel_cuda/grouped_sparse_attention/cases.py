"""Conformance cases of the grouped kernel, for 128 columns: lists by head and of neighbours, keys listed again."""

import dataclasses

import jax
import jax.numpy as jnp

from ejkernel.modules.operations.cases import token_sparse_attention as base
from ejkernel.modules.operations.cases.tables import Row, make_cases_of_rows
from ejkernel.modules.operations.token_sparse_attention import TokenSparseAttentionArguments
from ejkernel.ops.model import Case

SIZES = base.TokenSparseSizes(b=2, t=21, s=300, h=32, g=2, d=128, v=128, k=70, dtype=jnp.bfloat16)


def _neighbouring_lists(key: jax.Array) -> jax.Array:
    """Returns [2, 21, 70]: neighbours list most of the same keys, in orders of their own, and every seventh nothing."""
    first, order = jax.random.split(key)
    keys = jax.random.permutation(first, 300)[:70] + jnp.arange(21)[:, None] % 5
    lists = jax.random.permutation(order, jnp.broadcast_to(keys, (2, 21, 70)), axis=2, independent=True)
    return jnp.where((jnp.arange(21) % 7 == 6)[:, None], -1, lists)


_CASE_TABLE: tuple[Row[base.TokenSparseSizes], ...] = (
    (
        "128 + 128, lists by head, sinks, lse",
        dataclasses.replace(SIZES, indices_per_kv_head=True),
        lambda key: {"softmax_aux": jax.random.normal(key, (32,)), "return_lse": True},
        ("value", "softmax_aux"),
        (),
    ),
    (
        "128 + 128, neighbours list the same keys",
        SIZES,
        lambda key: {"indices": _neighbouring_lists(key), "return_lse": True, "softmax_scale": -0.06},
        ("value",),
        (),
    ),
    (
        "128 + 128, few keys, listed often",
        dataclasses.replace(SIZES, b=1, t=10, s=40, h=10, k=150),
        lambda key: {"return_lse": True},
        ("value",),
        ("awkward",),
    ),
)


def cases() -> dict[str, tuple[Case, ...]]:
    """Returns the conformance cases of each operation, by its name."""
    table = make_cases_of_rows(TokenSparseAttentionArguments, base.make_arrays, _CASE_TABLE)
    return {"token_sparse_attention": table}
