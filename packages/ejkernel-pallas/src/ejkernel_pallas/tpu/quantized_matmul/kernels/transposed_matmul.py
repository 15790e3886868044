"""Computes x times the transposed packed matrix: this kernel contracts the codes along words.

acc [block_m, block_r] += x_n [block_m, block_w] · values_n^T        x_n[:, j] = x[:, codes j + n]
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ejkernel.arithmetic import cdiv
from ejkernel.families.quantized_matmul import QuantizedMatmul
from ejkernel_pallas.tpu.mosaic.division import divide
from ejkernel_pallas.tpu.mosaic.launch import Operand
from ejkernel_pallas.tpu.mosaic.vectors import LANES, matrix_product, zero_outside
from ejkernel_pallas.tpu.quantized_matmul.kernels.packed_tile import (
    QuantizedRefs,
    group_factors,
    run_kernel,
    subtiles,
    unpacker,
    write_sums,
    zero_factors_from,
    zero_sums,
)
from ejkernel_pallas.tpu.quantized_matmul.spec import QuantizedSpec


def multiply_words(record: QuantizedMatmul, x: jax.Array, spec: QuantizedSpec) -> jax.Array:
    """Returns x [M, C] times the transposed packed matrix, [M, R] in `spec.output`."""
    m, r, w = spec.blocks.block_m, spec.blocks.block_r, spec.blocks.block_w
    output = jax.ShapeDtypeStruct((spec.rows, spec.packed_rows), spec.output)
    # XLA rearranges x once, so that code n of neighbouring words is multiplied with neighbouring columns: nothing moves
    # between lanes in the kernel.
    by_code = jnp.moveaxis(x.reshape(spec.rows, spec.words, spec.codes), 2, 0)
    return run_kernel(
        record,
        spec,
        _kernel,
        name="ejkernel_quantized_matmul_over_words",
        x=Operand(by_code, (spec.codes, m, w), lambda i, j, k: (0, i, k)),
        output=Operand(output, (m, r), lambda i, j, k: (i, j)),
        packed=lambda i, j, k: (j, k),
        steps=cdiv(spec.words, w),
    )


def _kernel(refs: QuantizedRefs, *, spec: QuantizedSpec, steps: int) -> None:
    """Processes one tile of the packed matrix, contracting the codes along its words."""
    k, ragged = pl.program_id(2), spec.words % spec.blocks.block_w != 0
    left = spec.words - k * spec.blocks.block_w
    zero_sums(refs, k)
    for row in range(0, spec.blocks.block_r, spec.piece):
        size = min(spec.piece, spec.blocks.block_r - row)
        factors = group_factors(refs, row, size, spec)
        if ragged:
            factors = zero_factors_from(factors, spec.groups - divide(k, spec.scale_tiles) * LANES, 1)
        for sub in subtiles(spec, row, size):
            unpack = unpacker(refs, factors, sub, k, spec)
            # The products of a word's codes are summed in registers before they are added to VMEM.
            total = jnp.zeros((spec.blocks.block_m, size), jnp.float32)
            for n in range(spec.codes):
                x = refs.x[n, :, sub.word : sub.word + sub.words]
                x = zero_outside(x, 0, left - sub.word, 1) if ragged else x
                total += matrix_product(x, unpack(n), (1, 1), spec.precision)
            refs.acc[:, row : row + size] += total
    write_sums(refs, k == steps - 1)
