"""Bounds of `mask_mod` over a tile, from those of what it reads: a block map in time linear in queries and keys.

    (documents[b, q_idx] == documents[b, k_idx]) & (k_idx <= q_idx)
     ─────────────────      ─────────────────       values of one query or of one key: computed for each,
                                                    then their minimum and maximum in every tile
    ─────────────────────────────────────────────   of both: whether it holds for some and for all pairs of two tiles,
                                                    by arithmetic of intervals

A tile may be empty or full although its bounds say that it is partial: kernels then compute its mask. Functions with
other operations of both indices are evaluated for every pair instead.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.arithmetic import cdiv
from ejkernel.planning.scalar_operations import compute_node
from ejkernel.planning.scalar_programs import ScalarProgram, loaded_arrays, scalar_program
from ejkernel.types.pair_functions import INDEX_NAMES, PairFunction

INT32 = np.iinfo(np.int32)
Interval = tuple[Any, Any]
"""The smallest and the largest value of a node over the pairs of every two tiles, [B|1, H|1, query tiles|1, key
tiles|1].
"""


def bounds_of_tiles(
    function: PairFunction, sizes: tuple[int, ...], block: tuple[int, int], origin: jax.Array | None
) -> tuple[jax.Array, jax.Array] | None:
    """Returns in which tiles `mask_mod` may let some pair attend, and in which it lets all of them, bool [B|1, H|1,
    query tiles, key tiles]; None for a function whose bounds are not known.

    Args:
        function: The function.
        sizes: Batch rows, query heads, queries and keys.
        block: Queries and keys of a tile.
        origin: int32 [4], the index of the first row, head, query and key in the whole call; None for zeros.
    """
    program = scalar_program(function)
    if program.refusals or not has_known_bounds(program):
        return None
    indices = indices_of_sizes(sizes, origin)
    may, must = _interval_of_result(program, indices, loaded_arrays(function), block)[::-1]
    shape = (*np.broadcast_shapes(may.shape[:2]), cdiv(sizes[2], block[0]), cdiv(sizes[3], block[1]))
    return jnp.broadcast_to(may, shape), jnp.broadcast_to(must, shape)


def has_known_bounds(program: ScalarProgram) -> bool:
    """Returns whether all operations of both the query and the key that the result depends on have bounds."""
    for n in program.live_nodes(program.result):
        node = program.nodes[n]
        if program.reads_both(n):
            operands = {program.nodes[x].dtype for x in node.operands}
            if node.operation not in RULES or "float32" in operands | {node.dtype}:
                return False
            if node.operation in ("and", "or", "not") and operands != {"bool"}:
                return False
            if node.operation in ("eq", "ne") and "bool" in operands:
                return False
            if node.operation == "convert_element_type" and node.dtype == "bool":
                return False
    return True


def _interval_of_result(
    program: ScalarProgram, indices: Sequence[jax.Array], arrays: tuple[jax.Array, ...], block: tuple[int, int]
) -> Interval:
    live = program.live_nodes(program.result)
    values = values_of_nodes(program, [n for n in live if not program.reads_both(n)], indices, arrays)
    intervals: dict[int, Interval] = {}

    def interval(n: int) -> Interval:
        if n not in intervals:
            intervals[n] = _interval_over_tiles(values[n], block)
        return intervals[n]

    for n in live:
        if program.reads_both(n):
            intervals[n] = RULES[program.nodes[n].operation](*(interval(x) for x in program.nodes[n].operands))
    return interval(program.result)


def values_of_nodes(
    program: ScalarProgram, nodes: Iterable[int], indices: Sequence[jax.Array], arrays: tuple[jax.Array, ...]
) -> dict[int, Any]:
    """Returns the values of nodes, each after its operands, for all rows, heads, queries and keys that they depend on.

    Args:
        program: The program.
        nodes: The nodes, with all that they depend on.
        indices: int32 [B|1, 1, 1, 1], [1, H|1, 1, 1], [1, 1, T|1, 1] and [1, 1, 1, S|1].
        arrays: The arrays that it loads elements of.
    """
    inputs, values = dict(zip(INDEX_NAMES, indices, strict=True)), dict[int, Any]()
    for n in nodes:
        node = program.nodes[n]
        operands = [values[x] for x in node.operands]
        if node.operation in inputs:
            values[n] = inputs[node.operation]
        elif node.operation == "constant":
            values[n] = jnp.full((1, 1, 1, 1), node.value, node.dtype)
        elif node.operation == "load":
            array = arrays[node.value]
            values[n] = array[tuple(operands)] if operands else array.reshape(1, 1, 1, 1)
        else:
            values[n] = compute_node(node, list(jnp.broadcast_arrays(*operands)))
    return values


def indices_of_sizes(sizes: Sequence[int], origin: jax.Array | None = None) -> tuple[jax.Array, ...]:
    """Returns the indices of batch rows, heads, queries and keys, from the origin's on: int32 [B, 1, 1, 1], [1, H, 1,
    1], [1, 1, T, 1] and [1, 1, 1, S].
    """
    starts = [0] * 4 if origin is None else [origin[axis].astype(jnp.int32) for axis in range(4)]
    return tuple(
        (jnp.arange(size, dtype=jnp.int32) + start).reshape([size if n == axis else 1 for n in range(4)])
        for axis, (size, start) in enumerate(zip(sizes, starts, strict=True))
    )


def _interval_over_tiles(values: jax.Array, block: tuple[int, int]) -> Interval:
    """Returns the minimum and the maximum in every tile of [B|1, H|1, T|1, S|1]."""
    bounds = []
    for reduce in (jnp.min, jnp.max):
        found = values
        for axis, size in zip((2, 3), block, strict=True):
            if values.shape[axis] > 1:
                # Past the last query or key, the last one is repeated.
                padding = [(0, -values.shape[axis] % size if n == axis else 0) for n in range(4)]
                padded = jnp.pad(found, padding, mode="edge")
                tiles = (*padded.shape[:axis], padded.shape[axis] // size, size, *padded.shape[axis + 1 :])
                found = reduce(padded.reshape(tiles), axis=axis + 1)
        bounds.append(found)
    return bounds[0], bounds[1]


def _add(x: Interval, y: Interval) -> Interval:
    """Returns the bounds of a sum; all numbers where one may overflow, since int32 then wraps around."""
    low, high = x[0] + y[0], x[1] + y[1]
    overflows = (((x[0] ^ low) & (y[0] ^ low)) | ((x[1] ^ high) & (y[1] ^ high))) < 0
    return jnp.where(overflows, INT32.min, low), jnp.where(overflows, INT32.max, high)


def _negate(x: Interval) -> Interval:
    wraps = x[0] == INT32.min
    return jnp.where(wraps, INT32.min, -x[1]), jnp.where(wraps, INT32.max, -x[0])


def _subtract(x: Interval, y: Interval) -> Interval:
    low, high = x[0] - y[1], x[1] - y[0]
    overflows = (((x[0] ^ y[1]) & (x[0] ^ low)) | ((x[1] ^ y[0]) & (x[1] ^ high))) < 0
    return jnp.where(overflows, INT32.min, low), jnp.where(overflows, INT32.max, high)


def _absolute(x: Interval) -> Interval:
    wraps = x[0] == INT32.min
    low = jnp.where((x[0] <= 0) & (x[1] >= 0), 0, jnp.minimum(jnp.abs(x[0]), jnp.abs(x[1])))
    high = jnp.maximum(jnp.abs(x[0]), jnp.abs(x[1]))
    return jnp.where(wraps, INT32.min, low), jnp.where(wraps, INT32.max, high)


def _equal(x: Interval, y: Interval) -> Interval:
    is_one_number = (x[0] == x[1]) & (y[0] == y[1]) & (x[0] == y[0])
    return is_one_number, (x[0] <= y[1]) & (y[0] <= x[1])


def _not(x: Interval) -> Interval:
    return ~x[1], ~x[0]


def _less(x: Interval, y: Interval) -> Interval:
    return x[1] < y[0], x[0] < y[1]


def _less_or_equal(x: Interval, y: Interval) -> Interval:
    return x[1] <= y[0], x[0] <= y[1]


def _maximum(x: Interval, y: Interval) -> Interval:
    return jnp.maximum(x[0], y[0]), jnp.maximum(x[1], y[1])


def _minimum(x: Interval, y: Interval) -> Interval:
    return jnp.minimum(x[0], y[0]), jnp.minimum(x[1], y[1])


def _select(condition: Interval, x: Interval, y: Interval) -> Interval:
    must, may = condition
    low, high = jnp.minimum(x[0], y[0]), jnp.maximum(x[1], y[1])
    return (
        jnp.where(must, y[0], jnp.where(may, low, x[0])),
        jnp.where(must, y[1], jnp.where(may, high, x[1])),
    )


RULES: dict[str, Callable[..., Interval]] = {
    "abs": _absolute,
    "add": _add,
    "and": lambda x, y: (x[0] & y[0], x[1] & y[1]),
    "clamp": lambda low, x, high: _minimum(_maximum(x, low), high),
    "convert_element_type": lambda x: (x[0].astype(jnp.int32), x[1].astype(jnp.int32)),
    "eq": _equal,
    "ge": lambda x, y: _less_or_equal(y, x),
    "gt": lambda x, y: _less(y, x),
    "le": _less_or_equal,
    "lt": _less,
    "max": _maximum,
    "min": _minimum,
    "ne": lambda x, y: _not(_equal(x, y)),
    "neg": _negate,
    "not": _not,
    "or": lambda x, y: (x[0] | y[0], x[1] | y[1]),
    "select_n": _select,
    "sub": _subtract,
}
"""Bounds of an operation's result, from those of its operands. False is less than True: the bounds of a bool say
whether it holds for all pairs, and whether it holds for some.
"""
