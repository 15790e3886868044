"""Inputs for `lightning_indexer_loss`: the named cases every backend is tested on, and inputs of any given shapes."""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.modules.operations.cases import token_sparse_attention
from ejkernel.modules.operations.cases.tables import Row, make_cases_of_rows
from ejkernel.modules.operations.cases.token_sparse_attention import MODEL_SIZES, TokenSparseSizes
from ejkernel.ops.model import Case

make_inputs = token_sparse_attention.make_inputs

_CASE_TABLE: tuple[Row[TokenSparseSizes], ...] = (
    ("grouped heads", TokenSparseSizes(b=2), lambda k: {}, (), ()),
    ("bfloat16", TokenSparseSizes(g=1, h=6, dtype=jnp.bfloat16), lambda k: {}, (), ()),
    (
        "empty lists",
        TokenSparseSizes(),
        lambda k: {"indices": jnp.where(jnp.arange(21)[:, None] % 3 > 0, jnp.arange(9), -1)[None]},
        (),
        ("awkward",),
    ),
    ("one key", TokenSparseSizes(t=5, k=1), lambda k: {"scores": jnp.ones((1, 5, 1))}, (), ("awkward",)),
    ("model", MODEL_SIZES, lambda k: {}, (), ("bench",)),
    ("small model", TokenSparseSizes(t=256, s=1024, h=16, g=1, d=96, k=128), lambda k: {}, (), ("bench_cpu",)),
)


def make_arrays(key: jax.Array, sizes: TokenSparseSizes) -> dict[str, Any]:
    """Returns query, key and indices of `token_sparse_attention`'s cases, and normal scores."""
    attention_key, score_key = jax.random.split(key)
    fields = token_sparse_attention.make_arrays(attention_key, sizes)
    scores = jax.random.normal(score_key, (sizes.b, sizes.t, sizes.k))
    return {**{name: fields[name] for name in ("query", "key", "indices")}, "scores": scores}


def cases(record_type: type) -> tuple[Case, ...]:
    """Returns the named cases as argument records of the given type."""
    return make_cases_of_rows(record_type, make_arrays, _CASE_TABLE)
