"""Forward pass of the quantised matmul in Triton."""

import jax
import jax.numpy as jnp

from ejkernel.arithmetic import cdiv
from ejkernel.families.quantized_matmul import QuantizedMatmul, apply_tensor_scale
from ejkernel.planning.quantized_formats import NF4
from ejkernel_triton.launch import ShapeDtype, launch
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
    matmul = packed_matmul_transposed if record.transpose else packed_matmul
    return matmul(record, record.x, config), ()


def packed_matmul(record: QuantizedMatmul, lhs: jax.Array, config: QuantizedTiles) -> jax.Array:
    """Returns left [M, R] times the packed matrix, [M, columns]."""
    from ejkernel_triton.quantized_matmul.kernels.packed_matmul import packed_matmul_kernel

    spec = make_spec(record, config)
    kernel_output = _launch_kernel(
        packed_matmul_kernel, record, lhs, spec, config, (spec.CODES_PER_WORD, spec.M, spec.W), spec.W, config.block_w
    )
    # Column `word * CODES_PER_WORD + n` is code n of the word.
    return apply_tensor_scale(record, jnp.moveaxis(kernel_output, 0, 2).reshape(spec.M, -1))


def packed_matmul_transposed(record: QuantizedMatmul, lhs: jax.Array, config: QuantizedTiles) -> jax.Array:
    """Returns left [M, columns] times the transposed packed matrix, [M, R]."""
    from ejkernel_triton.quantized_matmul.kernels.packed_matmul_transposed import packed_matmul_transposed_kernel

    spec = make_spec(record, config)
    # x is small compared with the matrix, so x is permuted to the order of codes, not the weights.
    x_by_code = jnp.moveaxis(lhs.reshape(spec.M, spec.W, spec.CODES_PER_WORD), 2, 0)
    output_shape = (1, spec.M, spec.R)
    kernel_output = _launch_kernel(
        packed_matmul_transposed_kernel, record, x_by_code, spec, config, output_shape, spec.R, config.block_r
    )
    return apply_tensor_scale(record, kernel_output[0])


def _launch_kernel(
    kernel: object,
    record: QuantizedMatmul,
    lhs: jax.Array,
    spec: QuantizedSpec,
    config: QuantizedTiles,
    output_shape: tuple[int, ...],
    output_axis_size: int,
    output_block: int,
) -> jax.Array:
    """Launches a kernel, and returns the sum of all splits' results in float32.

    Args:
        kernel: The kernel.
        record: The canonical arguments.
        lhs: The left operand, in the kernel's layout.
        spec: The kernel's constants.
        config: Warps and stages.
        output_shape: Shape of a split's result.
        output_axis_size: Length of the packed matrix's axis that is not contracted.
        output_block: Elements of that axis per program.
    """
    zero_points = None if record.zeros is None else record.zeros[None]
    nf4_table = jnp.asarray(NF4, jnp.float32)[None] if spec.HAS_CODE_TABLE else None
    (split_sums,) = launch(
        kernel,
        (lhs.astype(record.x.dtype)[None], record.packed[None], record.scales[None], zero_points, nf4_table),
        (ShapeDtype((1, spec.NUM_SPLITS, *output_shape), jnp.float32),),
        batch=1,
        grid=cdiv(output_axis_size, output_block) * cdiv(spec.M, spec.BLOCK_M) * spec.NUM_SPLITS,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        constants={"spec": spec},
    )
    # Split-K: a sum in a fixed order, so that results are reproducible bit for bit; atomics would not be.
    return split_sums[0].sum(axis=0)
