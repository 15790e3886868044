"""Tiles of the queries of a batch row, for kernels that read a list of keys per query."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.arithmetic import at_most, cdiv
from ejkernel.ops.params import Direction
from ejkernel.planning.fixed_tiles import TILE_ROWS
from ejkernel_xla.fixed_tiles import forward_in_tiles
from ejkernel_xla.sizes import check_positive

MAX_NUMBERS_PER_STEP = 2**20
"""Numbers of the largest temporary array: 4 MiB of float32 keep a CPU's matrix products long and its caches warm."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class QueryTile:
    """A configuration of one tile size.

    Attributes:
        block_q: Queries per tile.
        batch_invariant: Whether all tiles have this size, and each batch row is computed alone.
    """

    block_q: int
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        check_positive(self)


PUBLIC_FIELDS = {"block_q": "block_q"}
"""Public configuration field -> field of `QueryTile`."""


def fit_queries(tokens: int, numbers_per_query: int, max_numbers: int = MAX_NUMBERS_PER_STEP) -> QueryTile:
    """Returns the tile of the most queries, at most `tokens`, whose temporary array has no more than `max_numbers`."""
    return QueryTile(block_q=max(1, at_most(max_numbers // max(1, numbers_per_query), tokens)))


def batch_invariant(record: Any, device: Any, direction: Direction) -> QueryTile:
    """Returns the tile of all calls in a `batch_invariant` block."""
    return QueryTile(block_q=TILE_ROWS, batch_invariant=True)


def forward_in_query_tiles(
    forward: Callable[[Any, QueryTile], Any], record: Any, axes: Mapping[str, Any], config: QueryTile, out_axes: Any
) -> Any:
    """Returns the results of a forward pass, whose rows are computed alone and whose queries in tiles of fixed size.

    Args:
        forward: Record of a tile and its configuration -> tree of arrays.
        record: The record.
        axes: Axis letters of its arrays.
        config: The tile.
        out_axes: The axis of queries in the results, as the first levels of their tree.
    """
    tile = dataclasses.replace(config, batch_invariant=False)

    def row(record: Any) -> Any:
        return forward_in_tiles(
            lambda record: forward(record, tile), record, axes, "t", block=config.block_q, out_axes=out_axes
        )

    return forward_in_tiles(row, record, axes, "b", block=1)


def split_into_tiles(x: jax.Array, block: int, fill: int = 0) -> jax.Array:
    """Returns [T, ...] -> [tiles, block, ...], with `fill` after the last query."""
    tiles = cdiv(x.shape[0], block)
    padding = ((0, tiles * block - x.shape[0]), *((0, 0),) * (x.ndim - 1))
    return jnp.pad(x, padding, constant_values=fill).reshape(tiles, block, *x.shape[1:])


def join_tiles(x: jax.Array, length: int) -> jax.Array:
    """Returns [tiles, block, ...] -> [T, ...]."""
    return x.reshape(-1, *x.shape[2:])[:length]
