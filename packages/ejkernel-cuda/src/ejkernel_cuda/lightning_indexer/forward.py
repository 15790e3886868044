"""The FFI calls of the lightning indexer (csrc/lightning_indexer): scores of a chunk of queries, then the selection."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.arithmetic import cdiv
from ejkernel.families.lightning_indexer import LightningIndexer, TopKeyIndicesAndScores, nothing_selected
from ejkernel_cuda.library import register_handler
from ejkernel_cuda.lightning_indexer.config import KeySplits
from ejkernel_cuda.lightning_indexer.plan import queries_per_chunk, score_pitch


class Queries(NamedTuple):
    """What belongs to some queries.

    Attributes:
        query: [B, T, H, 128] float8_e4m3fn.
        weights: [B, T, H] float32, with the magnitude of the factor on products.
        key_starts: [B, T] int32.
        key_ends: [B, T] int32.
    """

    query: jax.Array
    weights: jax.Array
    key_starts: jax.Array
    key_ends: jax.Array


class Keys(NamedTuple):
    """The keys, negated where their factor on products is negative.

    Attributes:
        key: [B, S, 128] float8_e4m3fn.
        scales: [B, S] float32, at least 0; [0] for none.
    """

    key: jax.Array
    scales: jax.Array


def forward(record: LightningIndexer, config: KeySplits) -> tuple[TopKeyIndicesAndScores, tuple[()]]:
    """Returns the selected keys of a record.

    Leading axes that `jax.vmap` adds to all arrays are more batch rows to the kernels.

    Args:
        record: The canonical arguments.
        config: Keys of a block.

    Returns:
        Indices [B, T, K] int32 and scores [B, T, K] float32. There are no residuals.
    """
    batch, tokens = record.query.shape[:2]
    if not record.query.size or not record.key.size:
        return nothing_selected(record), ()
    queries, keys, chunk = queries_of(record), keys_of(record), queries_per_chunk(record)

    def select(queries: Queries) -> TopKeyIndicesAndScores:
        scores = ordered_scores(queries, keys, record, config)
        return select_top_k(scores, queries.key_starts, queries.key_ends, record.top_k)

    chunks = cdiv(tokens, chunk)
    if chunks == 1:
        return select(queries), ()

    def split(x: jax.Array) -> jax.Array:
        # Queries that fill up the last chunk have empty ranges of keys.
        padded = jnp.pad(x, ((0, 0), (0, chunks * chunk - tokens), *((0, 0),) * (x.ndim - 2)))
        return jnp.moveaxis(padded.reshape(batch, chunks, chunk, *x.shape[2:]), 1, 0)

    results = lax.map(select, Queries(*map(split, queries)))
    indices, scores = (jnp.moveaxis(x, 0, 1).reshape(batch, -1, record.top_k)[:, :tokens] for x in results)
    return (indices, scores), ()


def queries_of(record: LightningIndexer) -> Queries:
    """Returns what belongs to all queries of a record."""
    shape = record.query.shape[:2]
    bounds = (jnp.broadcast_to(x, shape) for x in (record.key_starts, record.key_ends))
    return Queries(record.query, record.weights.astype(jnp.float32) * abs(record.softmax_scale), *bounds)


def keys_of(record: LightningIndexer) -> Keys:
    """Returns the keys of a record. The kernel multiplies sums over heads by scales, which is exact for those of at
    least 0: a negative factor changes the sign of the key instead, before products are rectified.
    """
    key, is_negative = record.key, jnp.full((1, 1), record.softmax_scale < 0)
    scales = jnp.zeros(0)
    if record.key_scales is not None:
        scales = record.key_scales.astype(jnp.float32)
        is_negative ^= jnp.signbit(scales)
        scales = jnp.abs(scales)
    elif record.softmax_scale >= 0:
        return Keys(key, scales)
    bits = lax.bitcast_convert_type(key, jnp.uint8) ^ jnp.where(is_negative, jnp.uint8(128), jnp.uint8(0))[..., None]
    return Keys(lax.bitcast_convert_type(bits, key.dtype), scales)


def ordered_scores(queries: Queries, keys: Keys, record: LightningIndexer, config: KeySplits) -> jax.Array:
    """Returns scores [B, T, S], S rounded up to a multiple of 4, as integers in the order of numbers; undefined where
    no query of a group may select a key.
    """
    call = jax.ffi.ffi_call(
        register_handler("ejkernel_indexer_scores"),
        jax.ShapeDtypeStruct((*queries.query.shape[:2], score_pitch(record)), jnp.int32),
        vmap_method="broadcast_all",
    )
    return call(
        queries.query,
        keys.key,
        queries.weights,
        queries.key_starts,
        queries.key_ends,
        keys.scales,
        split_keys=np.int32(config.split_keys),
        rectify=record.rectify,
    )


def select_top_k(scores: jax.Array, key_starts: jax.Array, key_ends: jax.Array, top_k: int) -> TopKeyIndicesAndScores:
    """Returns indices and scores [B, T, K] of rows of scores."""
    shape = (*scores.shape[:2], top_k)
    call = jax.ffi.ffi_call(
        register_handler("ejkernel_indexer_select"),
        (jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, jnp.float32)),
        vmap_method="broadcast_all",
    )
    indices, selected = call(scores, key_starts, key_ends)
    return indices, selected
