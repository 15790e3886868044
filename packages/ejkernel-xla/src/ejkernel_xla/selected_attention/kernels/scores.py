"""The scores of queries that read one block.

Tile shapes: p queries, g query heads per KV head, k keys of the block; d and v sizes.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.families.selected_attention import SelectedAttention
from ejkernel.planning.precision import product_precision
from ejkernel_xla.selected_attention.kernels.lists import Operands, SelectedPlan, take
from ejkernel_xla.tiled_attention import plan as blocks


class OuterStep(NamedTuple):
    """A step of the outer loop: batch row, KV head, first query."""

    batch: jax.Array
    head: jax.Array
    query: jax.Array


def accumulator(record: SelectedAttention) -> Any:
    """Returns the dtype of scores, sums and products: float32, or float64 for float64 inputs."""
    return jnp.promote_types(record.query.dtype, jnp.float32)


def dot(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns a product of two tiles, accumulated and returned in the accumulator's dtype."""
    wide = jnp.promote_types(a.dtype, jnp.float32)
    return jnp.einsum(spec, a, b, precision=product_precision(a.dtype), preferred_element_type=wide)


def queries_of_step(x: jax.Array, plan: SelectedPlan, at: OuterStep) -> jax.Array:
    """Returns [B, Hk, T, ...] -> [t, ...], the queries of a step."""
    rest = x.shape[3:]
    part = blocks.take(x, (at.batch, at.head, at.query, *(0,) * len(rest)), (1, 1, plan.queries, *rest))
    return part.reshape(plan.queries, *rest)


def row_values_of_step(x: jax.Array, plan: SelectedPlan, at: OuterStep) -> jax.Array:
    """Returns [B|1, T] -> [t], the queries of a step."""
    return blocks.take(x, (at.batch, at.query), (1, plan.queries))[0]


def keys_of_block(x: jax.Array, at: OuterStep, start: jax.Array, size: int) -> jax.Array:
    """Returns [B, Hk, S, n] -> [k, n], the keys of a block."""
    return blocks.take(x, (at.batch, at.head, start, 0), (1, 1, size, x.shape[3]))[0, 0]


def block_scores(
    record: SelectedAttention, operands: Operands, plan: SelectedPlan, at: OuterStep, start: jax.Array, rows: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns scores [p, g, k] of queries of a step and a block, -inf where not allowed; the queries; the keys."""
    key = keys_of_block(operands.key, at, start, record.block_size)
    query = take(queries_of_step(operands.query, plan, at), rows)
    scores = dot("pgd,kd->pgk", query, key) * record.softmax_scale
    index = start + jnp.arange(record.block_size, dtype=jnp.int32)
    allowed = index <= take(row_values_of_step(operands.q_positions, plan, at), rows)[:, None]
    if operands.ids is not None:
        ids = blocks.take(operands.ids[1], (at.batch, start), (1, record.block_size))
        allowed &= ids == take(row_values_of_step(operands.ids[0], plan, at), rows)[:, None]
    allowed &= (rows < plan.queries)[:, None]
    return jnp.where(allowed[:, None], scores, -jnp.inf), query, key
