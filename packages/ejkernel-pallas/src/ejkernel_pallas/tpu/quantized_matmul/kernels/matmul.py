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
    group_factors,
    run_kernel,
    subtiles,
    unpacker,
    write_sums,
    zero_factors_from,
    zero_sums,
)
from ejkernel_pallas.tpu.quantized_matmul.spec import QuantizedSpec


def multiply_rows(record: QuantizedMatmul, x: jax.Array, spec: QuantizedSpec) -> jax.Array:
    """Returns x [M, R] times the packed matrix, [M, C] in `spec.output`."""
    m, r, w = spec.blocks.block_m, spec.blocks.block_r, spec.blocks.block_w
    outputs = run_kernel(
        record,
        spec,
        _kernel,
        name="ejkernel_quantized_matmul_over_rows",
        x=Operand(x, (m, r), lambda i, j, k: (i, k)),
        output=Operand(
            jax.ShapeDtypeStruct((spec.codes, spec.rows, spec.words), spec.output),
            (spec.codes, m, w),
            lambda i, j, k: (0, i, j),
        ),
        packed=lambda i, j, k: (k, j),
        steps=cdiv(spec.packed_rows, r),
    )
    return jnp.moveaxis(outputs, 0, 2).reshape(spec.rows, spec.words * spec.codes)


def _kernel(refs: QuantizedRefs, *, spec: QuantizedSpec, steps: int) -> None:
    """Processes one tile of the packed matrix, whose rows are contracted."""
    k, tile = pl.program_id(2), pl.program_id(1)
    left = spec.packed_rows - k * spec.blocks.block_r
    zero_sums(refs, k)
    # The tile is processed in pieces: each is unpacked just before its product, and stays in registers.
    for row in range(0, spec.blocks.block_r, spec.piece):
        size = min(spec.piece, spec.blocks.block_r - row)
        x, factors = refs.x[:, row : row + size], group_factors(refs, row, size, spec)
        if spec.packed_rows % spec.blocks.block_r:
            # Both operands are zeroed: memory past the end of either may contain NaN, which a 0 in the other does not
            # cancel.
            x, factors = zero_outside(x, 0, left - row, 1), zero_factors_from(factors, left - row, 0)
        for sub in subtiles(spec, row, size):
            unpack = unpacker(refs, factors, sub, tile, spec)
            for n in range(spec.codes):
                refs.acc[n, :, sub.word : sub.word + sub.words] += matrix_product(x, unpack(n), (1, 0), spec.precision)
    write_sums(refs, k == steps - 1)
