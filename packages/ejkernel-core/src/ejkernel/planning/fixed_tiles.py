"""Tiles of fixed sizes, in which calls in a `batch_invariant` block compute their rows.

XLA may add in another order, and fuse other products with sums, in arrays of another size and in code outside of a
loop. So each tile has the same sizes whatever the call, and one loop computes all tiles, also where there is only one.
Arrays have room for two steps of the loop at least: XLA moves what is the same in all steps out of it.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.arithmetic import cdiv

TILE_ROWS = 16
"""Rows of a tile: a CPU's matrix product computes the last rows of sizes that are no multiple by other instructions."""

MIN_STEPS = 2
"""Steps of a loop that its arrays have room for."""


def fixed_loop(count: Any, body: Callable[[jax.Array, Any], Any], carry: Any) -> Any:
    """Runs `lax.fori_loop` from 0 to a count that XLA does not know, so that it keeps a loop of a single step."""
    return lax.fori_loop(jnp.int32(0), lax.optimization_barrier(jnp.int32(count)), body, carry)


def scan_fixed(step: Callable[[Any, Any], tuple[Any, Any]], carry: Any, arrays: Any, length: int) -> tuple[Any, Any]:
    """Runs `lax.scan` over axis 0 of arrays of some length as a `fixed_loop`."""
    if not length:
        return lax.scan(step, carry, arrays)
    first = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), arrays)
    room = max(length, MIN_STEPS)
    arrays = jax.tree.map(lambda x: pad_axis(x, 0, room - length), arrays)
    results = jax.tree.map(lambda x: jnp.zeros((room, *x.shape), x.dtype), jax.eval_shape(step, carry, first)[1])

    def body(n: jax.Array, state: tuple[Any, Any]) -> tuple[Any, Any]:
        carry, results = state
        carry, result = step(carry, jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, n, keepdims=False), arrays))
        return carry, jax.tree.map(lambda x, y: lax.dynamic_update_index_in_dim(x, y, n, 0), results, result)

    carry, results = fixed_loop(length, body, (carry, results))
    return carry, jax.tree.map(lambda x: x[:length], results)


def map_tiles(function: Callable[[Any], Any], arrays: Mapping[str, jax.Array], block: int = TILE_ROWS) -> Any:
    """Returns the results of a function of tiles of `block` rows, joined along axis 0; zeros fill the last tile.

    Args:
        function: Arrays by name, of a tile -> tree of arrays with a row each.
        arrays: Arrays by name, with the rows on axis 0.
        block: Rows of a tile.
    """
    return map_tiles_of_axes(function, arrays, dict.fromkeys(arrays, 0), 0, block)


def map_tiles_of_axes(
    function: Callable[[Any], Any], arrays: Mapping[str, jax.Array], axes: Mapping[str, int], out_axes: Any, block: int
) -> Any:
    """Returns `map_tiles` of arrays whose rows lie on other axes.

    Args:
        function: As above.
        arrays: Arrays by name.
        axes: The axis of rows of each.
        out_axes: That of the results, as the first levels of their tree.
        block: Rows of a tile.
    """
    rows = next(x.shape[axes[name]] for name, x in arrays.items())
    tiles = cdiv(rows, block)
    room = max(tiles, MIN_STEPS) * block
    padded = {name: pad_axis(x, axes[name], room - rows) for name, x in arrays.items()}
    tile_shapes = {name: _with_size(x, axes[name], block) for name, x in arrays.items()}
    shapes = jax.eval_shape(function, tile_shapes)
    axis_of = jax.tree.map(lambda axis, results: jax.tree.map(lambda _: axis, results), out_axes, shapes)
    start = jax.tree.map(lambda x, axis: _zeros(_with_size(x, axis, room)), shapes, axis_of)

    def body(n: jax.Array, results: Any) -> Any:
        tile = {name: lax.dynamic_slice_in_dim(x, n * block, block, axes[name]) for name, x in padded.items()}
        return jax.tree.map(
            lambda x, part, axis: lax.dynamic_update_slice_in_dim(x, part, n * block, axis),
            results,
            function(tile),
            axis_of,
        )

    results = fixed_loop(tiles, body, start) if tiles else start
    return jax.tree.map(lambda x, axis: lax.slice_in_dim(x, 0, rows, axis=axis), results, axis_of)


def pad_axis(x: jax.Array, axis: int, count: int) -> jax.Array:
    """Returns x with `count` zeros after the last entry of an axis."""
    return jnp.pad(x, [(0, count if n == axis else 0) for n in range(x.ndim)])


def _with_size(x: Any, axis: int, size: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((*x.shape[:axis], size, *x.shape[axis + 1 :]), x.dtype)


def _zeros(x: jax.ShapeDtypeStruct) -> jax.Array:
    return jnp.zeros(x.shape, x.dtype)
