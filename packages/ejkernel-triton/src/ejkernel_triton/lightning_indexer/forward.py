"""Forward pass of the lightning indexer in Triton: the scores of a chunk of queries, then the selection of each row."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.arithmetic import cdiv
from ejkernel.families.lightning_indexer import LightningIndexer, TopKeyIndicesAndScores
from ejkernel_triton.launch import ShapeDtype, launch
from ejkernel_triton.lightning_indexer.config import IndexerTiles
from ejkernel_triton.lightning_indexer.plan import selecting_programs
from ejkernel_triton.lightning_indexer.spec import IndexerSpec, make_spec


def forward(record: LightningIndexer, config: IndexerTiles) -> tuple[TopKeyIndicesAndScores, tuple[()]]:
    """Returns the selected keys of a record.

    Args:
        record: The canonical arguments.
        config: Tiles, warps and stages.

    Returns:
        Indices [B, T, K] int32 and scores [B, T, K] float32. There are no residuals.
    """
    (batch, tokens, *_), shape = record.query.shape, (*record.query.shape[:2], record.top_k)
    if not record.query.size or not record.key.size:
        return (jnp.full(shape, -1, jnp.int32), jnp.full(shape, -jnp.inf, jnp.float32)), ()
    spec = make_spec(record)

    def select(first_query: jax.Array) -> TopKeyIndicesAndScores:
        start = first_query.reshape(1, 1)
        return _top_k(record, _ordered_scores(record, start, spec, config), start, spec, config)

    chunks = cdiv(tokens, spec.CHUNK)
    if chunks == 1:
        return select(jnp.zeros((), jnp.int32)), ()
    results = lax.map(select, jnp.arange(chunks, dtype=jnp.int32) * spec.CHUNK)
    indices, scores = (jnp.moveaxis(x, 0, 1).reshape(batch, -1, spec.K)[:, :tokens] for x in results)
    return (indices, scores), ()


def _ordered_scores(
    record: LightningIndexer, first_query: jax.Array, spec: IndexerSpec, config: IndexerTiles
) -> jax.Array:
    """Returns scores [B, CHUNK, S] of the queries from `first_query` [1, 1] on, as integers in the order of numbers;
    undefined where no query of a tile may select a key.
    """
    from ejkernel_triton.lightning_indexer.kernels.indexer_scores import indexer_scores_kernel

    batch = record.query.shape[0]
    (ordered_scores,) = launch(
        indexer_scores_kernel,
        (record.query, record.key, record.weights, record.key_starts, record.key_ends, first_query),
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


def _top_k(
    record: LightningIndexer, ordered_scores: jax.Array, first_query: jax.Array, spec: IndexerSpec, config: IndexerTiles
) -> TopKeyIndicesAndScores:
    """Returns indices and scores [B, CHUNK, K] of the queries from `first_query` [1, 1] on."""
    from ejkernel_triton.lightning_indexer.kernels.select_top_k import select_top_k_kernel
    from ejkernel_triton.lightning_indexer.kernels.sort_selected import sort_selected_kernel

    batch, programs = record.query.shape[0], selecting_programs(spec.CHUNK)
    ranges, shape = (record.key_starts, record.key_ends, first_query), (batch, spec.CHUNK, spec.K)
    options: dict[str, Any] = {"batch": batch, "num_stages": 1}
    selected_indices, selected_scores, _ = launch(
        select_top_k_kernel,
        (ordered_scores, *ranges),
        [ShapeDtype(x, jnp.int32) for x in (shape, shape, (batch, programs, 2, config.num_candidates))],
        grid=programs * batch,
        num_warps=config.select_warps,
        constants={
            "spec": spec,
            "NUM_PROGRAMS": programs,
            "CANDIDATES": config.num_candidates,
            # Between the bounds, as the guess may be off by the same factor either way.
            "TARGET": math.isqrt(spec.K * config.num_candidates),
        },
        **options,
    )
    indices, scores = launch(
        sort_selected_kernel,
        (selected_indices, selected_scores, *ranges),
        [ShapeDtype(shape, jnp.int32), ShapeDtype(shape, jnp.float32)],
        grid=spec.CHUNK * batch,
        num_warps=config.sort_warps,
        constants={"spec": spec},
        **options,
    )
    return indices, scores
