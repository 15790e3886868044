"""Forward pass of the lightning indexer in Triton: the scores of a chunk of queries, then the selection of each row."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.arithmetic import cdiv
from ejkernel.families.lightning_indexer import LightningIndexer, TopKeyIndicesAndScores, with_wide_query
from ejkernel_triton.launch import ShapeDtype, launch
from ejkernel_triton.lightning_indexer.config import IndexerTiles
from ejkernel_triton.lightning_indexer.spec import IndexerSpec, make_spec


def forward(record: LightningIndexer, config: IndexerTiles) -> tuple[TopKeyIndicesAndScores, tuple[()]]:
    """Returns the selected keys of a record.

    Args:
        record: The canonical arguments.
        config: Tiles, warps and stages.

    Returns:
        Indices [B, T, K] int32 and scores [B, T, K] float32. There are no residuals.
    """
    record = with_wide_query(record)
    (batch, tokens, *_), shape = record.query.shape, (*record.query.shape[:2], record.top_k)
    if not record.query.size or not record.key.size:
        return (jnp.full(shape, -1, jnp.int32), jnp.full(shape, -jnp.inf, jnp.float32)), ()
    # 8 bits are converted once, to a dtype that holds them exactly: products are those of the queries' dtype.
    record, spec = dataclasses.replace(record, key=record.key.astype(record.query.dtype)), make_spec(record)

    def select(first_query: jax.Array) -> TopKeyIndicesAndScores:
        start = first_query.reshape(1, 1)
        return select_top_k(record, ordered_scores_of_chunk(record, start, spec, config), start, spec, config)

    chunks = cdiv(tokens, spec.CHUNK)
    if chunks == 1:
        return select(jnp.zeros((), jnp.int32)), ()
    results = lax.map(select, jnp.arange(chunks, dtype=jnp.int32) * spec.CHUNK)
    indices, scores = (jnp.moveaxis(x, 0, 1).reshape(batch, -1, spec.K)[:, :tokens] for x in results)
    return (indices, scores), ()


def ordered_scores_of_chunk(
    record: LightningIndexer, first_query: jax.Array, spec: IndexerSpec, config: IndexerTiles
) -> jax.Array:
    """Returns scores [B, CHUNK, S] of the queries from `first_query` [1, 1] on, as integers in the same order as the
    scores; undefined in tiles whose queries may select none of the keys.
    """
    from ejkernel_triton.lightning_indexer.kernels.indexer_scores import indexer_scores_kernel

    batch = record.query.shape[0]
    (ordered_scores,) = launch(
        indexer_scores_kernel,
        (record.query, record.key, record.weights, record.key_starts, record.key_ends, first_query, record.key_scales),
        [ShapeDtype((batch, spec.CHUNK, spec.S), jnp.int32)],
        batch=batch,
        grid=cdiv(spec.CHUNK, config.block_q) * cdiv(spec.S, config.keys_per_program) * batch,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        constants={
            "spec": spec,
            "BLOCK_Q": config.block_q,
            "BLOCK_KV": config.block_kv,
            "KEYS_PER_PROGRAM": config.keys_per_program,
        },
    )
    return ordered_scores


def select_top_k(
    record: LightningIndexer, ordered_scores: jax.Array, first_query: jax.Array, spec: IndexerSpec, config: IndexerTiles
) -> TopKeyIndicesAndScores:
    """Returns indices and scores [B, CHUNK, K] of the queries from `first_query` [1, 1] on."""
    from ejkernel_triton.lightning_indexer.kernels.select_candidates import select_candidates_kernel
    from ejkernel_triton.lightning_indexer.kernels.sort_selected import sort_selected_kernel

    options = _options_of_rows(record, spec)
    shape = (record.query.shape[0], spec.CHUNK, spec.K)
    candidates, counts = _candidates(record, ordered_scores, first_query, spec, config)
    selected = launch(
        select_candidates_kernel,
        (candidates, counts),
        [ShapeDtype(shape, jnp.int32)] * 2,
        num_warps=config.select_warps,
        constants={"spec": spec, "CANDIDATES": config.num_candidates},
        **options,
    )
    indices, scores = launch(
        sort_selected_kernel,
        (*selected, counts),
        [ShapeDtype(shape, jnp.int32), ShapeDtype(shape, jnp.float32)],
        num_warps=config.sort_warps,
        constants={"spec": spec},
        **options,
    )
    return indices, scores


def _candidates(
    record: LightningIndexer, ordered_scores: jax.Array, first_query: jax.Array, spec: IndexerSpec, config: IndexerTiles
) -> tuple[jax.Array, jax.Array]:
    """Returns at least the K largest scores of each row and their keys, [B, CHUNK, 2, C], and their number."""
    from ejkernel_triton.lightning_indexer.kernels.gather_candidates import gather_candidates_kernel
    from ejkernel_triton.lightning_indexer.kernels.guess_threshold import guess_threshold_kernel

    options = _options_of_rows(record, spec)
    inputs = (ordered_scores, record.key_starts, record.key_ends, first_query)
    rows, count = (record.query.shape[0], spec.CHUNK), config.num_candidates
    (guesses,) = launch(
        guess_threshold_kernel,
        inputs,
        [ShapeDtype(rows, jnp.int32)],
        num_warps=config.sample_warps,
        constants={
            "spec": spec,
            "CANDIDATES": count,
            # The geometric mean of the bounds: the guess may be off by the same factor either way.
            "TARGET": math.isqrt(spec.K * count),
        },
        **options,
    )
    candidates, counts = launch(
        gather_candidates_kernel,
        (*inputs, guesses),
        [ShapeDtype((*rows, 2, count), jnp.int32), ShapeDtype(rows, jnp.int32)],
        num_warps=config.gather_warps,
        constants={"spec": spec, "CANDIDATES": count, "TILE": config.gather_tile},
        **options,
    )
    return candidates, counts


def _options_of_rows(record: LightningIndexer, spec: IndexerSpec) -> dict[str, Any]:
    """Returns the options of launches with a program per row of a chunk."""
    batch = record.query.shape[0]
    return {"batch": batch, "grid": spec.CHUNK * batch, "num_stages": 1}
