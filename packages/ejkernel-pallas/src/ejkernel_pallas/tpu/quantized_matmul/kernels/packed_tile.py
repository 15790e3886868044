"""Shared by both kernels: processing a tile of the packed matrix [R, C], whose rows are W words of several codes
each.

    HBM packed [R, W] ── double buffer ──► VMEM words [block_r, block_w]
                                             │ shift, mask, zero, scale: code n of all words, in registers
                                             ▼
    over rows    acc[n] [block_m, block_w] += x [block_m, block_r] · values_n       out[:, codes j + n] = acc[n][:, j]
    over words   acc    [block_m, block_r] += x_n [block_m, block_w] · values_n^T   x_n[:, j] = x[:, codes j + n]

The grid is (tiles of x's rows, tiles of columns, tiles of contracted elements). A tile of words is dequantized once for
each tile of x's rows. Every product takes few rows of words, so that the dequantized values stay in registers until the
matrix unit reads them. A group is never as long as a product of one code, so scales are applied to values, not to sums.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.arithmetic import cdiv
from ejkernel.families.quantized_matmul import QuantizedMatmul
from ejkernel_pallas.tpu.mosaic.division import divide
from ejkernel_pallas.tpu.mosaic.launch import KernelCall, Operand, Ref, launch, resident_operand, vmem_limit_bytes
from ejkernel_pallas.tpu.mosaic.vectors import LANES, zero_outside
from ejkernel_pallas.tpu.quantized_matmul.kernels.dequantize import (
    ScalesAndZeros,
    bfloat16_pairs,
    decode_scales,
    dequantize_codes,
    dequantize_pair,
    make_codebook,
    spread_groups_over_words,
)
from ejkernel_pallas.tpu.quantized_matmul.spec import QuantizedSpec, bitcast_float16_scales


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizedRefs:
    """Refs of both kernels; fields that are not needed are None.

    Attributes:
        x: [block_m, block_r], rows of the left operand; when contracting over words, [codes, block_m, block_w].
        packed_words: int32 [block_r, block_w], a tile of the packed matrix.
        scales: As stored, [block_r, 128], or int32 of `bfloat16_pairs` where codes are dequantized in pairs.
        zeros: Zeros of affine codes, in the same way.
        codebook: float32 [1, 128], the values of codes that are indices in a table.
        output: [codes, block_m, block_w]; when contracting over words, [block_m, block_r].
        acc: Scratch, float32, with the shape of the output.
    """

    x: Ref
    packed_words: Ref
    scales: Ref
    output: Ref
    acc: Ref
    zeros: Ref = None
    codebook: Ref = None


def run_kernel(
    record: QuantizedMatmul,
    spec: QuantizedSpec,
    kernel: Callable[..., None],
    *,
    name: str,
    x: Operand,
    output: Operand,
    packed_index_map: Callable[..., tuple[Any, Any]],
    num_contracted_tiles: int,
) -> jax.Array:
    """Runs one of the kernels; `packed_index_map` maps a grid step to its tile of the packed matrix."""
    block = (spec.blocks.block_r, spec.blocks.block_w)

    def scale_index_map(*grid_indices: Any) -> tuple[Any, Any]:
        row, word = packed_index_map(*grid_indices)
        return row, divide(word, spec.tiles_per_scale_block)

    inputs = {
        "x": x,
        "packed_words": Operand(lax.bitcast_convert_type(record.packed, jnp.int32), block, packed_index_map),
    }
    for label, stored in (("scales", record.scales), ("zeros", record.zeros)):
        if stored is not None:
            scale_array = bitcast_float16_scales(stored)
            if spec.unpacks_pairs:
                # XLA decodes these: the kernel would decode 128 groups of a row for a tile, which has fewer.
                scale_array = bfloat16_pairs(decode_scales(scale_array, spec.format))
            inputs[label] = Operand(scale_array, (block[0], LANES), scale_index_map)
    codebook = make_codebook(spec.format)
    if codebook is not None:
        inputs["codebook"] = resident_operand(codebook)
    shape: Any = output.block
    scratch = {"acc": pltpu.VMEM(shape, jnp.float32)}
    results = launch(
        KernelCall(
            name=name,
            kernel=functools.partial(kernel, spec=spec, num_contracted_tiles=num_contracted_tiles),
            refs=QuantizedRefs,
            grid=(
                cdiv(spec.padded_rows, spec.blocks.block_m),
                cdiv(output.array.shape[-1], shape[-1]),
                num_contracted_tiles,
            ),
            # Rows and columns are parallel; contracted tiles are sequential, as they add to one accumulator.
            num_parallel_axes=2,
            scalar_tables={},
            inputs=inputs,
            outputs={"output": output},
            scratch=scratch,
            vmem_limit=vmem_limit_bytes((*inputs.values(), output), scratch),
        )
    )
    return results["output"]


class SubTile(NamedTuple):
    """The part of a tile that one product takes.

    Attributes:
        first_row: Index of its first row in the tile.
        num_rows: The number of rows.
        first_word: Index of its first word in the tile's rows.
        num_words: The number of words per row.
    """

    first_row: int
    num_rows: int
    first_word: int
    num_words: int


def subtiles(spec: QuantizedSpec, row: int, rows: int) -> list[SubTile]:
    """Returns the subtiles of `rows` rows of a tile, beginning at row `row`."""
    width, size = spec.blocks.block_w, spec.rows_and_words_per_product
    return [SubTile(row, rows, word, min(size, width - word)) for word in range(0, width, size)]


def zero_accumulator(refs: QuantizedRefs, k: Any) -> None:
    """Zeroes the accumulator before the first tile of contracted elements."""

    @pl.when(k == 0)
    def _() -> None:
        refs.acc[...] = jnp.zeros_like(refs.acc)


def write_accumulator_after_last_tile(refs: QuantizedRefs, is_last_tile: Any) -> None:
    """Writes the accumulator to the output after the last tile of contracted elements."""

    @pl.when(is_last_tile)
    def _() -> None:
        refs.output[...] = refs.acc[...].astype(refs.output.dtype)


def load_scales_and_zeros(refs: QuantizedRefs, row: int, size: int, spec: QuantizedSpec) -> ScalesAndZeros:
    """Returns the scales and zeros of `size` rows, beginning at row `row` of the tile; a block has 128 groups."""
    rows = slice(row, row + size)
    if spec.unpacks_pairs:
        return ScalesAndZeros(refs.scales[rows, :], None if refs.zeros is None else refs.zeros[rows, :])
    zeros = None if refs.zeros is None else decode_scales(refs.zeros[rows, :], spec.format)
    return ScalesAndZeros(decode_scales(refs.scales[rows, :], spec.format), zeros)


def zero_scales_and_zeros_from(scales_and_zeros: ScalesAndZeros, first: Any, axis: int) -> ScalesAndZeros:
    """Returns factors with 0 from index `first` on: memory beyond an array may contain anything, NaN included."""
    zeros = None if scales_and_zeros.zeros is None else zero_outside(scales_and_zeros.zeros, 0, first, axis)
    return ScalesAndZeros(zero_outside(scales_and_zeros.scales, 0, first, axis), zeros)


def make_dequantizer(
    refs: QuantizedRefs, scales_and_zeros: ScalesAndZeros, sub: SubTile, tile: Any, spec: QuantizedSpec
) -> Callable[[int], jax.Array]:
    """Returns a function from n to the values of code n of a subtile's words, or of pair n of their codes; its factors
    are spread once for all codes of a word.
    """
    # A block of 128 groups serves `tiles_per_scale_block` tiles of words, a power of two.
    first = (tile & (spec.tiles_per_scale_block - 1)) * spec.blocks.block_w + sub.first_word
    codebook = None if refs.codebook is None else jnp.broadcast_to(refs.codebook[...], (sub.num_rows, LANES))
    groups: list[tuple[jax.Array, ScalesAndZeros]] = []
    for lane in range(0, sub.num_words, LANES):
        scales = spread_groups_over_words(scales_and_zeros.scales, first + lane, spec)
        zeros = (
            None
            if scales_and_zeros.zeros is None
            else spread_groups_over_words(scales_and_zeros.zeros, first + lane, spec)
        )
        at = sub.first_word + lane
        groups.append(
            (
                refs.packed_words[sub.first_row : sub.first_row + sub.num_rows, at : at + LANES],
                ScalesAndZeros(scales, zeros),
            )
        )

    def dequantize(n: int, words: jax.Array, factors: ScalesAndZeros) -> jax.Array:
        if spec.unpacks_pairs:
            return dequantize_pair(words, n, factors, spec)
        return dequantize_codes(words, n, factors, codebook, spec)

    return lambda n: jnp.concatenate([dequantize(n, *group) for group in groups], axis=1)
