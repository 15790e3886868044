"""Defines the argument record of the lightning indexer, and functions of the record alone."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.types.arguments import arguments, array, static

TopKeyIndicesAndScores = tuple[jax.Array, jax.Array]
"""Indices [B, T, K] int32 of the keys (or blocks) with the largest scores, and these scores."""


@arguments
class LightningIndexer:
    """Canonical input of one call. B batch, T queries, S keys, H indexer heads, D channels.

    Attributes:
        query: [B, T, H, D] floating; float8_e4m3fn, without a gradient, only with such keys.
        key: [B, S, D], same dtype as query, or 8 bits, which have no gradient; all heads share it. With block_tables
            [P, S, D], pages of S slots.
        weights: [B, T, H] floating.
        key_starts: [B|1, T] int32, the first key that a query may select, at least 0.
        key_ends: [B|1, T] int32, the key after the last one, at most the keys of a row. Causality, windows, packed
            sequences and padding are all such ranges; a query with an empty one selects nothing.
        top_k: K, how many keys (or blocks) are selected per query.
        softmax_scale: Factor on the products of queries and keys.
        key_scales: [B, S] or [P, S] float32, factors on the products with each key. Has no gradient.
        block_tables: [B, N] int, the pages of each row's keys, key s in page `s // S`. Keys of an entry that is no page
            cannot be selected. No row lists a page twice.
        block_size: Keys per block from the first key of a row on; above 1, blocks are selected.
        rectify: Whether negative products count as 0.
    """

    query: jax.Array = array("b t h d", gradient=True)
    key: jax.Array = array("b s d", gradient=True)
    weights: jax.Array = array("b t h", gradient=True)
    key_starts: jax.Array = array("b t")
    key_ends: jax.Array = array("b t")
    top_k: int = static()
    softmax_scale: float = static()
    key_scales: jax.Array | None = array("b s", default=None)
    block_tables: jax.Array | None = array("b n", default=None)
    block_size: int = static(default=1)
    rectify: bool = static(default=True)


def axes(record: LightningIndexer) -> Mapping[str, Any]:
    """Returns axis letters of a record's fields and of its outputs. Pages are not those of a batch row."""
    row = "b" if record.block_tables is None else "p"
    return {
        "query": "b t h d",
        "key": f"{row} s d",
        "weights": "b t h",
        "key_starts": "b t",
        "key_ends": "b t",
        "key_scales": f"{row} s",
        "block_tables": "b n",
        "output": ("b t k", "b t k"),
    }


def wide_query_dtype(record: LightningIndexer) -> Any:
    """Returns the dtype of queries; bfloat16 for those of 8 bits, of which it holds each value."""
    return record.query.dtype if record.query.dtype.itemsize > 1 else jnp.dtype(jnp.bfloat16)


def with_wide_query(record: LightningIndexer) -> LightningIndexer:
    """Returns the record with queries in `wide_query_dtype`."""
    query, dtype = record.query, wide_query_dtype(record)
    if query.dtype == dtype:
        return record
    is_shape = isinstance(query, jax.ShapeDtypeStruct)
    wide = jax.ShapeDtypeStruct(query.shape, dtype) if is_shape else query.astype(dtype)
    return dataclasses.replace(record, query=wide)


def num_keys(record: LightningIndexer) -> int:
    """Returns the keys of a batch row, those of absent pages among them."""
    size = record.key.shape[1]
    return size if record.block_tables is None else record.block_tables.shape[1] * size


def accumulator(record: LightningIndexer) -> Any:
    """Returns the dtype of products, sums and scores: float32, or float64 for float64 queries."""
    return jnp.promote_types(wide_query_dtype(record), jnp.float32)


def nothing_selected(record: LightningIndexer) -> TopKeyIndicesAndScores:
    """Returns the result of a call without queries or keys: indices of -1 and scores of -inf, [B, T, K] each."""
    shape = (*record.query.shape[:2], record.top_k)
    return jnp.full(shape, -1, jnp.int32), jnp.full(shape, -jnp.inf, accumulator(record))


def floats_from_ordered_integers(integers: jax.Array, dtype: Any) -> jax.Array:
    """Returns the floats of integers from `ejkernel.families.expert_routing.order_preserving_integers`.

    -0 comes back as 0.
    """
    smallest = jnp.iinfo(integers.dtype).min
    return lax.bitcast_convert_type(jnp.where(integers < 0, smallest - integers, integers), dtype)


def rectify(products: jax.Array) -> jax.Array:
    """Returns `max(0, products)`, and NaN for NaN, which XLA's maximum for CPUs loses."""
    return jnp.where(products <= 0, 0, products)


def take_keys(keys: jax.Array, indices: jax.Array) -> jax.Array:
    """Returns the keys at some indices, 0 for an index below 0: [S, D] and [..., K] -> [..., K, D]."""
    if not keys.shape[0]:
        return jnp.zeros((*indices.shape, keys.shape[1]), keys.dtype)
    return jnp.where((indices >= 0)[..., None], keys[jnp.maximum(indices, 0)], 0)
