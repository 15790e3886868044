"""Forward pass of the quantised matmul in Triton."""

import jax
import jax.numpy as jnp

from ejkernel.arithmetic import cdiv
from ejkernel.families.quantized_matmul import QuantizedMatmul, finished
from ejkernel.planning.quantized_formats import NF4
from ejkernel_triton.launch import Shape, launch
from ejkernel_triton.quantized_matmul.config import QuantizedTiles
from ejkernel_triton.quantized_matmul.spec import QuantizedSpec, make_spec


def forward(record: QuantizedMatmul, config: QuantizedTiles) -> tuple[jax.Array, tuple[()]]:
    """Returns the output of a record.

    Args:
        record: The canonical arguments.
        config: Tiles, splits, warps and stages.

    Returns:
        [M, N] in x's dtype. There are no residuals.
    """
    matmul = matmul_over_words if record.transpose else matmul_over_rows
    return matmul(record, record.x, config), ()


def matmul_over_rows(record: QuantizedMatmul, left: jax.Array, config: QuantizedTiles) -> jax.Array:
    """Returns left [M, R] times the packed matrix, [M, columns]."""
    from ejkernel_triton.quantized_matmul.kernels.matmul_over_rows import matmul_over_rows_kernel

    spec = make_spec(record, config)
    kernel_output = _launch_kernel(
        matmul_over_rows_kernel, record, left, spec, config, (spec.PER, spec.M, spec.W), spec.W, config.block_w
    )
    # Column `word * PER + n` is code n of the word.
    return finished(record, jnp.moveaxis(kernel_output, 0, 2).reshape(spec.M, -1))


def matmul_over_words(record: QuantizedMatmul, left: jax.Array, config: QuantizedTiles) -> jax.Array:
    """Returns left [M, columns] times the transposed packed matrix, [M, R]."""
    from ejkernel_triton.quantized_matmul.kernels.matmul_over_words import matmul_over_words_kernel

    spec = make_spec(record, config)
    # x is small compared with the matrix, so x is permuted to the order of codes, not the weights.
    x_by_code = jnp.moveaxis(left.reshape(spec.M, spec.W, spec.PER), 2, 0)
    shape = (1, spec.M, spec.R)
    kernel_output = _launch_kernel(
        matmul_over_words_kernel, record, x_by_code, spec, config, shape, spec.R, config.block_r
    )
    return finished(record, kernel_output[0])


def _launch_kernel(
    kernel: object,
    record: QuantizedMatmul,
    left: jax.Array,
    spec: QuantizedSpec,
    config: QuantizedTiles,
    shape: tuple[int, ...],
    output_size: int,
    block: int,
) -> jax.Array:
    """Returns the sum of all splits' outputs, float32 of shape `shape`; `output_size` is split into blocks, one per
    program.
    """
    zero_points = None if record.zeros is None else record.zeros[None]
    nf4_table = jnp.asarray(NF4, jnp.float32)[None] if spec.HAS_CODE_TABLE else None
    (split_outputs,) = launch(
        kernel,
        (left.astype(record.x.dtype)[None], record.packed[None], record.scales[None], zero_points, nf4_table),
        (Shape((1, spec.NUM_SPLITS, *shape), jnp.float32),),
        batch=1,
        grid=cdiv(output_size, block) * cdiv(spec.M, spec.BLOCK_M) * spec.NUM_SPLITS,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        constants={"spec": spec},
    )
    # Split-K: a sum in a fixed order, so that results are reproducible bit for bit; atomics would not be.
    return split_outputs[0].sum(axis=0)
