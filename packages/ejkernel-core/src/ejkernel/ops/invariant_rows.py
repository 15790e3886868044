"""What operations compute for each row outside of their kernels, in a `batch_invariant` block.

XLA compiles this code for the whole array. On a CPU, a sum over the last axis then adds in an order that depends on the
number of rows, a product with one row adds in another order than one with several, and the last entries of an array
run other instructions than the vectors before them. In the block, the rows are therefore computed by one loop over
tiles of a fixed size:

- A tile has the same shape in all calls, and the loop's body has no other array as an input, so its program is the
  same, whatever the number of rows.
- The count of steps is hidden from XLA, so that it keeps the loop and fuses nothing with the code around it.
- The size of a tile depends on nothing but the size of a row, and is a multiple of the CPU's vectors, so that rows at
  all indices run the same instructions.

Derivatives are those of the plain function: the block does not cover them.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax

from ejkernel._collective_calls import call_without_varying_axes
from ejkernel.arithmetic import is_symbolic
from ejkernel.ops.batch_invariance import is_batch_invariant
from ejkernel.ops.device import current_device
from ejkernel.planning.fixed_tiles import TILE_ROWS, map_tiles

ENTRIES_ON_CPU = 1 << 13
ENTRIES_ELSEWHERE = 1 << 20
"""Entries of a tile. Small tiles cost a CPU less where a call has few rows; each step costs a GPU several launches."""

MAX_TILE_ROWS = 1024
PRODUCT_ROWS_ELSEWHERE = 1024
"""Rows of a product where a step is costly, if each row of a tile has one."""


@dataclasses.dataclass(frozen=True)
class _RowFunction:
    """A function of arrays of rows and of arrays that all rows share.

    Attributes:
        function: (*rows, *shared) -> tree of arrays, of any number of rows.
        axes: Number of leading axes that count rows, in the arrays and in the results.
        tile_rows: Rows of a tile; None for a size that follows from that of a row.
    """

    function: Callable[..., Any]
    axes: int
    tile_rows: int | None

    def __call__(self, rows: tuple[jax.Array, ...], shared: tuple[jax.Array, ...]) -> Any:
        return self.function(*rows, *shared)

    def in_tiles(self, rows: tuple[jax.Array, ...], shared: tuple[jax.Array, ...]) -> Any:
        """Returns the results, computed for tiles [rows of a tile, 1, ..., 1, *sizes of a row]."""
        lead, ones = rows[0].shape[: self.axes], (1,) * (self.axes - 1)
        flat = {str(n): x.reshape(-1, *ones, *x.shape[self.axes :]) for n, x in enumerate(rows)}

        def of_tile(tile: dict[str, jax.Array]) -> Any:
            return self(tuple(tile[str(n)] for n in range(len(rows))), shared)

        results = map_tiles(of_tile, flat, self.tile_rows or _tile_rows(rows, self.axes))
        return jax.tree.map(lambda x: x.reshape(*lead, *x.shape[self.axes :]), results)


def compute_rows(
    function: Callable[..., Any],
    rows: tuple[jax.Array, ...],
    shared: tuple[jax.Array, ...] = (),
    *,
    axes: int = 1,
    tile_rows: int | None = None,
) -> Any:
    """Returns `function(*rows, *shared)`, in a `batch_invariant` block computed in tiles of a fixed number of rows.

    Args:
        function: (*rows, *shared) -> tree of arrays. It computes each row alone, and reads no traced array of another
            function.
        rows: Arrays with the same leading axes.
        shared: Arrays that all rows share.
        axes: Number of leading axes, which the results have too. In a tile, all but the first have size 1.
        tile_rows: Rows of a tile, where the size of a row is not enough to choose it.
    """
    return compute_rows_in_tiles(function, rows, shared, axes=axes, tile_rows=tile_rows, fixed=is_batch_invariant())


def compute_rows_in_tiles(
    function: Callable[..., Any],
    rows: tuple[jax.Array, ...],
    shared: tuple[jax.Array, ...] = (),
    *,
    axes: int,
    fixed: bool,
    tile_rows: int | None = None,
) -> Any:
    """Returns `compute_rows`, for code that JAX may trace after the block has ended.

    Args:
        function: As above.
        rows: As above.
        shared: As above.
        axes: As above.
        fixed: Whether rows are computed in tiles.
        tile_rows: As above.
    """
    lead = rows[0].shape[:axes]
    is_plain = not fixed or any(map(is_symbolic, lead)) or not math.prod(lead)
    call = _RowFunction(function, axes, tile_rows)
    return call(rows, shared) if is_plain else _in_tiles(call, rows, shared)


def product_tile_rows(rows_per_product: int) -> int:
    """Returns the rows of a tile of matrix products, each with several rows of its matrix per row of the tile: a
    product has a multiple of 16 rows, so that a CPU computes all of them by the same instructions.
    """
    return (TILE_ROWS if _is_on_cpu() else PRODUCT_ROWS_ELSEWHERE) // math.gcd(TILE_ROWS, rows_per_product)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _in_tiles(call: _RowFunction, rows: tuple[jax.Array, ...], shared: tuple[jax.Array, ...]) -> Any:
    return call_without_varying_axes(lambda arrays: call.in_tiles(*arrays), (rows, shared))


@_in_tiles.defjvp
def _tangents(call: _RowFunction, primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[Any, Any]:
    return _in_tiles(call, *primals), jax.jvp(call, primals, tangents)[1]


def _tile_rows(rows: tuple[jax.Array, ...], axes: int) -> int:
    """Returns a power of two: as many rows as have about so many entries as suit the device."""
    entries = ENTRIES_ON_CPU if _is_on_cpu() else ENTRIES_ELSEWHERE
    size = max(math.prod(x.shape[axes:]) for x in rows)
    return min(max(1 << max(entries // max(size, 1), 1).bit_length() - 1, TILE_ROWS), MAX_TILE_ROWS)


def _is_on_cpu() -> bool:
    return current_device().platform == "cpu"
