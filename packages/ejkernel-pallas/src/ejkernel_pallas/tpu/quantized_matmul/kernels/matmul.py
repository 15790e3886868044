"""Computes x times the packed matrix: this kernel contracts the packed matrix's rows.

acc[n] [block_m, block_w] += x [block_m, block_r] · values_n        out[:, codes j + n] = acc[n][:, j]
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ejkernel.arithmetic import cdiv
from ejkernel.families.quantized_matmul import QuantizedMatmul
from ejkernel_pallas.tpu.mosaic.launch import Operand
from ejkernel_pallas.tpu.mosaic.vectors import matrix_product, zero_outside
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


def multiply_packed(record: QuantizedMatmul, x: jax.Array, spec: QuantizedSpec) -> jax.Array:
    """Returns x [M, R] times the packed matrix, [M, C] in `spec.output_dtype`."""
    m, r, w = spec.blocks.block_m, spec.blocks.block_r, spec.blocks.block_w
    left = Operand(x, (m, r), lambda i, j, k: (i, k))
    if spec.unpacks_pairs:
        # Rows of x for even rows of a pair, which have zeros for odd ones, and then rows for odd ones.
        pairs = jnp.stack([jnp.stack([x, 0 * x], axis=2), jnp.stack([0 * x, x], axis=2)])
        left = Operand(pairs.reshape(2 * spec.padded_rows, 2 * x.shape[1]), (2 * m, 2 * r), lambda i, j, k: (i, k))
    outputs = run_kernel(
        record,
        spec,
        _kernel,
        name="ejkernel_quantized_matmul_over_rows",
        x=left,
        output=Operand(
            jax.ShapeDtypeStruct((spec.codes_per_word, spec.padded_rows, spec.words_per_row), spec.output_dtype),
            (spec.codes_per_word, m, w),
            lambda i, j, k: (0, i, j),
        ),
        packed_index_map=lambda i, j, k: (k, j),
        num_contracted_tiles=cdiv(spec.packed_rows, r),
    )
    return jnp.moveaxis(outputs, 0, 2).reshape(spec.padded_rows, spec.words_per_row * spec.codes_per_word)


def _kernel(refs: QuantizedRefs, *, spec: QuantizedSpec, num_contracted_tiles: int) -> None:
    """Processes one tile of the packed matrix, whose rows are contracted."""
    k, tile = pl.program_id(2), pl.program_id(1)
    left = spec.packed_rows - k * spec.blocks.block_r
    columns_per_row = 2 if spec.unpacks_pairs else 1
    zero_accumulator(refs, k)
    # The tile is processed in pieces: each is unpacked just before its product, and stays in registers.
    for row in range(0, spec.blocks.block_r, spec.rows_and_words_per_product):
        size = min(spec.rows_and_words_per_product, spec.blocks.block_r - row)
        columns = slice(row * columns_per_row, (row + size) * columns_per_row)
        x, scales_and_zeros = refs.x[:, columns], load_scales_and_zeros(refs, row, size, spec)
        if spec.packed_rows % spec.blocks.block_r:
            # Both operands are zeroed: memory past the end of either may contain NaN, which a 0 in the other does not
            # cancel.
            x, scales_and_zeros = (
                zero_outside(x, 0, (left - row) * columns_per_row, 1),
                zero_scales_and_zeros_from(scales_and_zeros, left - row, 0),
            )
        for sub in subtiles(spec, row, size):
            unpack = make_dequantizer(refs, scales_and_zeros, sub, tile, spec)
            words = slice(sub.first_word, sub.first_word + sub.num_words)
            for n in range(spec.codes_per_word // columns_per_row):
                product = matrix_product(x, unpack(n), (1, 0), spec.precision)
                refs.acc[n, :, words] += product[: spec.blocks.block_m]
                if spec.unpacks_pairs:
                    refs.acc[n + spec.codes_per_word // 2, :, words] += product[spec.blocks.block_m :]
    write_accumulator_after_last_tile(refs, k == num_contracted_tiles - 1)
