"""Conformance cases of latent lists with sinks, and of lists whose union takes several products with one-hot rows."""

import jax
import jax.numpy as jnp

from ejkernel.modules.operations.cases.tables import Row, make_cases_of_rows
from ejkernel.modules.operations.cases.token_sparse_attention import LATENT_SIZES, TokenSparseSizes, make_arrays
from ejkernel.modules.operations.token_sparse_attention import TokenSparseAttentionArguments
from ejkernel.ops.model import Case

_LONG = TokenSparseSizes(
    b=2, t=11, s=530, h=5, g=1, d=136, v=128, k=150, values_in_keys=True, indices_per_kv_head=True, dtype=jnp.bfloat16
)

_CASES: tuple[Row[TokenSparseSizes], ...] = (
    (
        "latent, sinks, repeated keys",
        LATENT_SIZES,
        lambda key: {
            "indices": jax.random.randint(key, (1, 21, 9), -1, 7),
            "softmax_aux": jax.random.normal(key, (6,)),
            "return_lse": True,
        },
        ("softmax_aux",),
        ("awkward",),
    ),
    ("latent, three groups of keys", _LONG, lambda key: {}, (), ("awkward",)),
)


def cases() -> dict[str, tuple[Case, ...]]:
    """Returns the cases, by operation."""
    return {"token_sparse_attention": make_cases_of_rows(TokenSparseAttentionArguments, make_arrays, _CASES)}
