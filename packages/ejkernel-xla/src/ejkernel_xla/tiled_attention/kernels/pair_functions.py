"""The functions of pairs that a caller gives, on one tile of the score matrix: `score_mod` and `mask_mod`.

They are functions of scalars, mapped over the axes of a tile. What does not depend on an axis is computed once for it.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.families.tiled_attention import TiledAttention
from ejkernel.types.pair_functions import INDEX_NAMES, PairFunction, PairProgram
from ejkernel_xla.tiled_attention.plan import SCORES_PER_STEP, OuterStep, TilePlan


def modify_scores(
    function: PairFunction, scores: jax.Array, record: TiledAttention, plan: TilePlan, at: OuterStep, tile: jax.Array
) -> jax.Array:
    """Returns the scores of a tile after `score_mod`, [b, h, g, t, s]."""
    b, h, g, t, s = scores.shape
    indices = _tile_indices(plan, at, tile, record.dropout_origin)
    return function.of_pairs(scores.reshape(b, h * g, t, s), *indices).astype(scores.dtype).reshape(scores.shape)


def pull_back_scores(
    unmodified: jax.Array,
    dscores: jax.Array,
    record: TiledAttention,
    plan: TilePlan,
    at: OuterStep,
    tile: jax.Array,
) -> tuple[jax.Array, tuple[jax.Array | None, ...]]:
    """Returns the gradients of the scores before `score_mod`, [b, h, g, t, s], and of the arrays in it.

    Args:
        unmodified: [b, h, g, t, s], the scores before `score_mod`.
        dscores: [b, h, g, t, s], gradient of the scores after it.
        record: The canonical arguments.
        plan: How they are cut.
        at: Step of the outer loop.
        tile: The key tile.

    Returns:
        The gradient of the scores, and one of every captured array, None for integers.
    """
    function: Any = record.score_mod
    floating = {
        n: x.astype(jnp.promote_types(x.dtype, unmodified.dtype))  # the sums over pairs need its digits
        for n, x in enumerate(function.captured)
        if jnp.issubdtype(x.dtype, jnp.floating)
    }

    def run(scores: jax.Array, floating: dict[int, jax.Array]) -> jax.Array:
        captured = tuple(floating.get(n, x) for n, x in enumerate(function.captured))
        return modify_scores(dataclasses.replace(function, captured=captured), scores, record, plan, at, tile)

    # A function that multiplies a score of -inf with an array would have the gradient -inf x 0.
    unmodified = jnp.where((unmodified == -jnp.inf) & (dscores == 0), 1, unmodified)
    dunmodified, gradients = jax.vjp(run, unmodified, floating)[1](dscores)
    return dunmodified, tuple(gradients.get(n) for n in range(len(function.captured)))


def pairs_in_mask(
    function: PairFunction, plan: TilePlan, at: OuterStep, tile: jax.Array, origin: jax.Array | None
) -> jax.Array:
    """Returns which pairs of a tile `mask_mod` lets attend, bool [b|1, h|1, g|1, t|1, s|1]."""
    indices = _tile_indices(plan, at, tile, origin)
    read = [
        x if name in function.program.inputs_read else x.reshape(-1)[:1].reshape(1, 1, 1, 1)
        for name, x in zip(INDEX_NAMES, indices, strict=True)
    ]
    pairs = function.of_pairs(*read)
    heads = (plan.heads, plan.group) if pairs.shape[1] > 1 else (1, 1)
    return pairs.reshape(pairs.shape[0], *heads, *pairs.shape[2:])


def tiles_of_mask(record: TiledAttention, function: PairFunction, plan: TilePlan) -> tuple[Any, Any]:
    """Returns in which tiles `mask_mod` lets some pair attend, and in which all of them.

    It is evaluated for every pair, one tile at a time: once for all calls of these sizes if it reads no array and the
    call is not a shard, and otherwise in every pass.

    Returns:
        Two bool [batch chunks | 1, head chunks | 1, query tiles, key tiles].
    """
    if function.captured or record.dropout_origin is not None:
        return _classify_tiles(function, plan, record.dropout_origin)
    return _classify_tiles_once(function.program, plan)


@functools.lru_cache(maxsize=64)
def _classify_tiles_once(program: PairProgram, plan: TilePlan) -> tuple[np.ndarray, np.ndarray]:
    with jax.ensure_compile_time_eval():
        some, every = jax.jit(lambda: _classify_tiles(PairFunction(captured=(), program=program), plan, None))()
        return np.asarray(some), np.asarray(every)


def _classify_tiles(function: PairFunction, plan: TilePlan, origin: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    read = function.program.inputs_read
    chunks = [count if name in read else 1 for name, count in zip("bh", plan.chunks, strict=True)]
    shape: tuple[Any, ...] = (*chunks, plan.queries.tiles, plan.keys.tiles)

    def tile(n: jax.Array) -> tuple[jax.Array, jax.Array]:
        row, head, query, key = jnp.unravel_index(n, shape)
        at = OuterStep(row, query, row * plan.batch, head * plan.heads, plan.queries.start(query))
        pairs = pairs_in_mask(function, plan, at, key, origin)
        return jnp.any(pairs), jnp.all(pairs)

    pairs_per_tile = plan.batch * plan.heads * plan.group * plan.queries.block * plan.keys.block
    known = all(isinstance(size, int) for size in shape)  # not of a symbolic batch, as in `jax.export`
    batch_size = max(1, SCORES_PER_STEP // pairs_per_tile) if known else None
    some, every = lax.map(tile, jnp.arange(math.prod(shape), dtype=jnp.int32), batch_size=batch_size)
    return some.reshape(shape), every.reshape(shape)


def _tile_indices(plan: TilePlan, at: OuterStep, tile: jax.Array, origin: jax.Array | None) -> list[jax.Array]:
    """Returns the indices in the whole call of the rows, query heads, queries and keys of a tile, int32 [b, 1, 1, 1],
    [1, h g, 1, 1], [1, 1, t, 1] and [1, 1, 1, s].
    """
    starts = (at.batch, at.head * plan.group, at.query, plan.keys.start(tile))
    sizes = (plan.batch, plan.heads * plan.group, plan.queries.block, plan.keys.block)
    indices = []
    for axis, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        index = jnp.arange(size, dtype=jnp.int32) + start
        index = index if origin is None else index + origin[axis].astype(jnp.int32)
        indices.append(index.reshape([size if axis == n else 1 for n in range(4)]))
    return indices
