"""Computes x times the transposed packed matrix: this kernel contracts the codes along words.

acc [block_m, block_r] += x_n [block_m, block_w] · values_n^T        x_n[:, j] = x[:, codes j + n]
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ejkernel.arithmetic import cdiv
from ejkernel.families.quantized_matmul import QuantizedMatmul
from ejkernel_pallas.tpu.mosaic.division import divide
from ejkernel_pallas.tpu.mosaic.launch import Operand
from ejkernel_pallas.tpu.mosaic.vectors import LANES, deinterleave, matrix_product, zero_outside
from ejkernel_pallas.tpu.quantized_matmul.kernels.packed_tile import (
    QuantizedRefs,
    load_scales_and_zeros,
    make_dequantizer,
    run_kernel,
    subtiles,
    write_accumulator_after_last_tile,
    zero_accumulator,
    zero_scales_and_zeros_from,
)
from ejkernel_pallas.tpu.quantized_matmul.spec import QuantizedSpec


def multiply_transposed_packed(record: QuantizedMatmul, x: jax.Array, spec: QuantizedSpec) -> jax.Array:
    """Returns x [M, C] times the transposed packed matrix, [M, R] in `spec.output_dtype`."""
    m, r, w = spec.blocks.block_m, spec.blocks.block_r, spec.blocks.block_w
    output = jax.ShapeDtypeStruct((spec.padded_rows, spec.packed_rows), spec.output_dtype)
    # XLA rearranges x once, so that code n of neighbouring words is multiplied with neighbouring columns: nothing moves
    # between lanes in the kernel.
    by_code = jnp.moveaxis(x.reshape(spec.padded_rows, spec.words_per_row, spec.codes_per_word), 2, 0)
    return run_kernel(
        record,
        spec,
        _kernel,
        name="ejkernel_quantized_matmul_over_words",
        x=Operand(by_code, (spec.codes_per_word, m, w), lambda i, j, k: (0, i, k)),
        output=Operand(output, (m, r), lambda i, j, k: (i, j)),
        packed_index_map=lambda i, j, k: (j, k),
        num_contracted_tiles=cdiv(spec.words_per_row, w),
    )


def _kernel(refs: QuantizedRefs, *, spec: QuantizedSpec, num_contracted_tiles: int) -> None:
    """Processes one tile of the packed matrix, contracting the codes along its words."""
    k, ragged = pl.program_id(2), spec.words_per_row % spec.blocks.block_w != 0
    left = spec.words_per_row - k * spec.blocks.block_w
    zero_accumulator(refs, k)
    for row in range(0, spec.blocks.block_r, spec.rows_and_words_per_product):
        size = min(spec.rows_and_words_per_product, spec.blocks.block_r - row)
        scales_and_zeros = load_scales_and_zeros(refs, row, size, spec)
        if ragged:
            scales_and_zeros = zero_scales_and_zeros_from(
                scales_and_zeros, spec.groups_per_row - divide(k, spec.tiles_per_scale_block) * LANES, 1
            )
        for sub in subtiles(spec, row, size):
            unpack = make_dequantizer(refs, scales_and_zeros, sub, k, spec)
            words = slice(sub.first_word, sub.first_word + sub.num_words)
            # The products of a word's codes are summed in registers before they are added to VMEM.
            total: Any = 0.0
            for n in range(spec.codes_per_word // 2 if spec.unpacks_pairs else spec.codes_per_word):
                x = refs.x[n, :, words]
                if spec.unpacks_pairs:
                    x = jnp.concatenate([x, refs.x[n + spec.codes_per_word // 2, :, words]], axis=0)
                x = zero_outside(x, 0, left - sub.first_word, 1) if ragged else x
                total += matrix_product(x, unpack(n), (1, 1), spec.precision)
            if spec.unpacks_pairs:
                # The rows of `unpack(n)` alternate between two codes, and so do the columns of the products: even ones
                # belong to the upper rows of x, odd ones to the lower rows.
                even, odd = deinterleave(total)
                total = even[: spec.blocks.block_m] + odd[spec.blocks.block_m :]
            refs.acc[:, row : row + size] += total
    write_accumulator_after_last_tile(refs, k == num_contracted_tiles - 1)
