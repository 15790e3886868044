"""Conformance cases of `score_mod` and `mask_mod`."""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.modules.operations.cases.tables import Row


def rows_with_functions(cross: Any, square: Any) -> tuple[Row[Any], ...]:
    """Returns rows of the case table of `flash_attention`, with functions that read arrays and functions that do not.

    Args:
        cross: Sizes of a call with 4 heads and different numbers of queries and keys.
        square: Sizes of a longer call.
    """
    return (
        (
            "score and mask functions with arrays, lse",
            cross,
            lambda k: {**_score_function_of_distances(k, 4), **_mask_of_documents(k, cross), "return_lse": True},
            ("score_mod", "mask_mod"),
            (),
        ),
        (
            "mask function of heads, soft cap and slopes by score function",
            square,
            lambda k: {**_soft_cap_and_slopes(k, square), "mask_mod": _prefix_of_heads},
            ("score_mod", "mask_mod"),
            ("awkward",),
        ),
    )


def _score_function_of_distances(key: jax.Array, heads: int) -> dict[str, Any]:
    """Returns a score function that reads a table by head and distance, and a slope by query."""
    table, slopes = jax.random.normal(key, (heads, 21)), jax.random.normal(key, (heads, 1))

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        return score * (1 + 0.1 * slopes[h, 0]) + table[h, 10 + jnp.clip(k_idx - q_idx, -10, 10)]

    return {"score_mod": score_mod}


def _mask_of_documents(key: jax.Array, sizes: Any) -> dict[str, Any]:
    """Returns a mask function of documents, which differ by batch row; some queries are in no document."""
    documents = jnp.cumsum(jax.random.bernoulli(key, 0.1, (sizes.b, max(sizes.t, sizes.s))), axis=1)
    return {"mask_mod": lambda b, h, q_idx, k_idx: (documents[b, q_idx] == documents[b, k_idx]) & (q_idx != 3)}


def _soft_cap_and_slopes(key: jax.Array, sizes: Any) -> dict[str, Any]:
    """Returns a score function that reads a slope by head and a bias by key, neither by query and key together."""
    slopes, biases = 0.1 * jax.random.normal(key, (sizes.h,)), jax.random.normal(key, (sizes.b, sizes.s))

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        capped = 2.0 * jnp.tanh(score / 2.0) + slopes[h] * jnp.abs(q_idx - k_idx)
        return jnp.where(k_idx == q_idx, score, capped + biases[b, k_idx])

    return {"score_mod": score_mod}


def _prefix_of_heads(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
    return (k_idx < 8 * h) | (k_idx <= q_idx)
