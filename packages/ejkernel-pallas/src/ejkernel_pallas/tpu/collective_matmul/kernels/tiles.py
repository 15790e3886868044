"""Tiled products of arrays in HBM, in a pipeline that prefetches the next tiles, inside a kernel.

for rows, columns, contracted:    sum = [earlier tile] + a tile @ b tile + ...   -> output tile
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel_pallas.tpu.collective_matmul.spec import CollectiveSpec, TileShape
from ejkernel_pallas.tpu.mosaic.launch import Ref
from ejkernel_pallas.tpu.mosaic.vectors import matrix_product


class ContractedAxes(NamedTuple):
    """The contracted axis of each operand of a product: 0 or 1."""

    a: int
    b: int


class Product(NamedTuple):
    """A product of two arrays in HBM.

    Attributes:
        a: [rows, contracted], or transposed.
        b: [contracted, columns], or transposed.
    """

    a: Ref
    b: Ref


def sum_scratch(num_sums: int, tile: TileShape) -> dict[str, Any]:
    """Returns the float32 sums of a tile, as scratch memory."""
    return {"sums": pltpu.VMEM((num_sums, tile.rows, tile.columns), jnp.float32)}


def multiply_rows(
    spec: CollectiveSpec,
    tile: TileShape,
    axes: ContractedAxes,
    products: Sequence[Product],
    outputs: Sequence[Ref],
    sums: Ref,
    *,
    earlier: Ref | None = None,
    shares_b: bool = False,
) -> None:
    """Writes products, each to an output, or the sum of all to one output.

    Args:
        spec: The kernel's constants.
        tile: Tile sizes, which divide the arrays.
        axes: The contracted axes.
        products: The products, of equal shapes.
        outputs: An array for each product, or one for the sum of all.
        sums: Scratch memory for sums.
        earlier: Earlier values of the one output, to which the products are added; may be the output itself.
        shares_b: Whether all products have the b of the first, of which tiles are then copied once.
    """
    first = products[0]
    rows, contracted = first.a.shape[1 - axes.a], first.a.shape[axes.a]
    grid = rows // tile.rows, first.b.shape[1 - axes.b] // tile.columns, contracted // tile.contracted
    operands = [product.a for product in products] + [product.b for product in (products[:1] if shares_b else products)]
    a_spec = _operand_spec((tile.rows, tile.contracted), axes.a == 0, lambda m, n, k: (m, k))
    b_spec = _operand_spec((tile.contracted, tile.columns), axes.b == 1, lambda m, n, k: (k, n))
    output_spec = pl.BlockSpec((tile.rows, tile.columns), lambda m, n, k: (m, n))
    specs = [a_spec] * len(products) + [b_spec] * (len(operands) - len(products))
    pltpu.emit_pipeline(
        functools.partial(
            _add_products, spec, axes, len(products), len(outputs), sums, has_earlier=earlier is not None
        ),
        grid=grid,
        in_specs=[*specs, *([] if earlier is None else [output_spec])],
        out_specs=[output_spec] * len(outputs),
    )(*operands, *([] if earlier is None else [earlier]), *outputs)


def _operand_spec(shape: tuple[int, int], is_transposed: bool, index: Any) -> pl.BlockSpec:
    """Returns the blocks of an operand, whose axes are the other way round where it is transposed."""
    if not is_transposed:
        return pl.BlockSpec(shape, index)
    return pl.BlockSpec(shape[::-1], lambda *step: index(*step)[::-1])


def _add_products(
    spec: CollectiveSpec,
    axes: ContractedAxes,
    num_products: int,
    num_outputs: int,
    sums: Ref,
    *blocks: Ref,
    has_earlier: bool,
) -> None:
    """Adds one step's products to the sums of a tile, and writes the tile after the last step."""
    step, last = pl.program_id(2), pl.num_programs(2) - 1
    inputs, outputs = blocks[: len(blocks) - num_outputs], blocks[len(blocks) - num_outputs :]
    a_blocks, b_blocks = inputs[:num_products], inputs[num_products : len(inputs) - has_earlier]

    @pl.when(step == 0)
    def _() -> None:
        for n in range(num_outputs):
            sums[n] = inputs[-1][...] if has_earlier else jnp.zeros(sums.shape[1:], jnp.float32)

    partial_sums = [
        matrix_product(a[...], b_blocks[n % len(b_blocks)][...], (axes.a, axes.b), spec.precision)
        for n, a in enumerate(a_blocks)
    ]
    if num_outputs < num_products:
        partial_sums = [functools.reduce(jax.numpy.add, partial_sums)]
    for n, partial_sum in enumerate(partial_sums):
        sums[n] += partial_sum

    @pl.when(step == last)
    def _() -> None:
        for n, output in enumerate(outputs):
            output[...] = sums[n].astype(output.dtype)
