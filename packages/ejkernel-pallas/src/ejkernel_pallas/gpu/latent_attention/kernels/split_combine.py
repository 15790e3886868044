"""Merges the partial results of items that were split over several programs, in a separate kernel.

A block has 64 heads and `COLUMNS` columns of one item. The programs of an item are consecutive: the first one wrote its
second slot, all others their first. Items of a single program are not touched.

    slots of programs   [first, second] [first, second] [first, second]
    an item's parts             part 0 ─► part 1 ──────► part 2           online softmax over parts, weight exp(lse)
"""

import dataclasses
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from ejkernel_pallas.gpu.hopper import arrays
from ejkernel_pallas.gpu.hopper.arrays import over_columns
from ejkernel_pallas.gpu.hopper.in_place import update
from ejkernel_pallas.gpu.hopper.sizes import I32, WGMMA_M
from ejkernel_pallas.gpu.latent_attention.plan import LatentSchedule
from ejkernel_pallas.gpu.latent_attention.spec import LOWEST, ScheduledSpec

COLUMNS = 64
"""Columns that a thread block merges at a time."""
BLOCKS = 528
"""The approximate number of thread blocks: four per multiprocessor."""


@dataclasses.dataclass(frozen=True)
class Parts:
    """The outputs of the latent kernel, or of one with the same schedule. W columns: 512, or the value dimension.

    Attributes:
        output: [T * tiles * 64, W] of items of a single program.
        lse: [T * tiles, 64] of the same items.
        parts: [programs * 2 * tiles, 64, W] float32, partial results of the other items.
        part_lse: [programs * 2 * tiles, 64], their lse.
    """

    output: Any
    lse: Any
    parts: Any
    part_lse: Any


def combined(
    spec: ScheduledSpec, plan: LatentSchedule, made: Parts, stored: int = WGMMA_M
) -> tuple[jax.Array, jax.Array]:
    """Returns output [T, H, W] and lse [T, H] of all items.

    Args:
        spec: Constants.
        plan: Items and shares.
        made: The kernel's outputs.
        stored: The number of leading rows of a tile that it wrote.
    """
    operands = {"parts": made.parts, "part_lse": made.part_lse, "items": plan.items, "shares": plan.shares}
    width = made.output.shape[1]
    across = width // COLUMNS
    # Blocks with nothing to merge cost little, but not nothing: with many tiles each block has more columns.
    while across % 2 == 0 and spec.rows * spec.tiles * across > BLOCKS:
        across //= 2

    def body(given: dict[str, Any], updated: dict[str, Any]) -> None:
        block = lax.axis_index("block")
        tile, place = lax.div(block, I32(across)), lax.rem(block, I32(across))
        _combine(spec, given, updated, tile, (place * width // across, width // across), stored)

    results = {"output": made.output, "lse": made.lse}
    results = update(body, operands, results, spec.rows * spec.tiles * across)
    output, lse = results["output"], results["lse"]
    output = output.reshape(spec.rows, spec.tiles * WGMMA_M, width)[:, : spec.heads]
    return output, lse.reshape(spec.rows, spec.tiles * WGMMA_M)[:, : spec.heads]


def _combine(
    spec: ScheduledSpec, given: dict[str, Any], updated: dict[str, Any], number: Any, part: tuple[Any, int], stored: int
) -> None:
    """Merges columns of one tile of heads of an item; `part` is the first column and their number."""
    item, tile = lax.div(number, I32(spec.tiles)), lax.rem(number, I32(spec.tiles))
    start, steps = given["items"][item, 2], given["items"][item, 3]
    # All programs have equal shares, except the last ones: program 1 starts where the first share ends.
    share = jnp.maximum(given["shares"][1, 1], 1)
    first, last = lax.div(start, share), lax.div(start + steps - 1, share)
    rows = pl.ds(number * WGMMA_M, WGMMA_M)

    def merge(stage: Any, carry: Any) -> Any:
        column = part[0] + stage * COLUMNS
        columns = pl.ds(column, COLUMNS)

        def slot(program: Any) -> Any:
            return (program * 2 + (program == first).astype(I32)) * spec.tiles + tile

        def load(program: Any) -> tuple[Any, Any]:
            # With an odd number of partial results, the last is loaded twice, the second time with a weight of 0.
            place = slot(jnp.minimum(program, last))
            part_lse = arrays.load_rows(given["part_lse"].at[place])
            part = arrays.load_first_rows(given["parts"].at[place, :, columns], stored)
            return jnp.where(program <= last, part_lse, LOWEST), part

        def add(number: Any, state: Any) -> Any:
            output, row_max, row_sum = state
            # Two at a time, so that all their loads are in flight together.
            pair = [load(first + 2 * number + n) for n in (0, 1)]
            top = jnp.maximum(row_max, jnp.maximum(pair[0][0], pair[1][0]))
            alpha = jnp.exp(row_max - top)
            output, row_sum = output * over_columns(alpha, output.shape), row_sum * alpha
            for part_lse, part in pair:
                # A partial result is normalised by its own denominator, so its weight is exp(lse). Their order is
                # fixed: results are reproducible bit for bit.
                weight = jnp.exp(part_lse - top)
                output, row_sum = output + part * over_columns(weight, part.shape), row_sum + weight
            return output, top, row_sum

        zeros = arrays.full_tile((WGMMA_M, COLUMNS)), arrays.full_rows(WGMMA_M, LOWEST), arrays.full_rows(WGMMA_M, 0.0)
        output, row_max, row_sum = lax.fori_loop(0, lax.div(last - first + 2, I32(2)), add, zeros)
        output = output * over_columns(1 / row_sum, output.shape)
        arrays.store_first_rows(updated["output"].at[rows, columns], output.astype(spec.dtype), stored)

        @pl.when(column == 0)
        # All blocks of columns compute lse; the first writes it.
        def _lse() -> None:
            updated["lse"][number] = row_max + jnp.log(row_sum)

        return carry

    # Items of a single program are complete.
    @pl.when(first != last)
    def _merge() -> None:
        lax.fori_loop(0, part[1] // COLUMNS, merge, I32(0))
