"""Queries and outputs in the coordinates of a cache of codes, and back (`ejkernel.planning.turboquant`)."""

import dataclasses
from collections.abc import Callable

import jax
from jax import lax

from ejkernel.families.paged_attention.record import PagedAttention
from ejkernel.planning import turboquant


def key_head_dim(record: PagedAttention) -> int:
    """Returns the columns of a key, those of signs among them: as many as rotated queries have."""
    return record.query.shape[-1] + (0 if record.projection is None else record.projection.shape[0])


def rotate_queries(record: PagedAttention, *, by_row: bool = False) -> PagedAttention:
    """Returns a record whose queries are in the cache's coordinates; as it is if it has no rotation.

    Args:
        record: The record.
        by_row: One row at a time, so that a row does not depend on how many there are, bit for bit.
    """
    rotation = record.rotation
    if rotation is None:
        return record
    projection = rotation[:0] if record.projection is None else record.projection
    queries = _rows(lambda rows: turboquant.extended_queries(rows, rotation, projection), record.query, by_row)
    return dataclasses.replace(record, query=queries, rotation=None, projection=None)


def rotate_back(record: PagedAttention, output: jax.Array, *, by_row: bool = False) -> jax.Array:
    """Returns the output [T, H, D] of a record for one in the cache's coordinates; as it is if it has no rotation.

    Args:
        record: The record, with its rotation.
        output: [T, H, D].
        by_row: One row at a time, as `rotate_queries`.
    """
    rotation = record.rotation
    return output if rotation is None else _rows(lambda rows: turboquant.rotate_back(rows, rotation), output, by_row)


def _rows(function: Callable[[jax.Array], jax.Array], x: jax.Array, by_row: bool) -> jax.Array:
    return lax.map(function, x) if by_row else function(x)
