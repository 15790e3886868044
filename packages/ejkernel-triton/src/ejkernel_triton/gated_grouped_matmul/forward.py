"""The gated grouped matmul in Triton."""

import jax

from ejkernel.families.gated_grouped_matmul import GatedGroupedMatmul, as_grouped_matmul
from ejkernel.families.grouped_matmul import GroupedMatmul, columns
from ejkernel.families.grouped_matmul.row_tiles import find_row_tiles, max_num_row_tiles
from ejkernel_triton.gated_grouped_matmul.config import GROUP_M, GatedTiles, gathered_rows_shape
from ejkernel_triton.gated_grouped_matmul.spec import GatedSpec
from ejkernel_triton.grouped_matmul.spec import add_batch_axis, choose_dot_precision, converts_to_float32
from ejkernel_triton.launch import ShapeDtype, launch


def forward(record: GatedGroupedMatmul, config: GatedTiles) -> tuple[jax.Array, tuple[()]]:
    """Returns the output of a record.

    Args:
        record: The canonical arguments.
        config: Tiles, programs, warps and stages.

    Returns:
        [M, F] in lhs's dtype. There are no residuals.
    """
    from ejkernel_triton.gated_grouped_matmul.kernels.gated_grouped_gemm import gated_grouped_gemm_kernel

    grouped_matmul_record = as_grouped_matmul(record, gathered_rows_shape(record), record.lhs.dtype)
    spec = _make_spec(record, grouped_matmul_record, config)
    tiles = find_row_tiles(grouped_matmul_record, config.block_m)
    (output,) = launch(
        gated_grouped_gemm_kernel,
        (
            record.lhs[None],
            record.rhs[None],
            add_batch_axis(record.rhs_bias),
            add_batch_axis(record.indices),
            tiles[None],
        ),
        (ShapeDtype((1, spec.ROWS, spec.COLUMNS), record.lhs.dtype),),
        batch=1,
        grid=spec.NUM_PROGRAMS,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        constants={"spec": spec},
    )
    return output[0], ()


def _make_spec(record: GatedGroupedMatmul, grouped_matmul_record: GroupedMatmul, config: GatedTiles) -> GatedSpec:
    """Returns the constants of the kernel for a record, whose product is `grouped_matmul_record`."""
    (rows, contracted), matrix_columns = grouped_matmul_record.lhs.shape, columns(grouped_matmul_record)
    matrices = record.rhs.shape[0]
    return GatedSpec(
        NUM_TOKENS=record.lhs.shape[0],
        CONTRACTED_SIZE=contracted,
        ROWS=rows,
        COLUMNS=matrix_columns // 2 if record.gated else matrix_columns,
        NUM_MATRICES=matrices,
        RHS_STRIDES=(1, contracted) if record.transpose_rhs else (matrix_columns, 1),
        GATE_LAYOUT="no gate" if not record.gated else "interleaved" if record.interleaved else "halves",
        GATHERS_ROWS=record.indices is not None,
        HAS_BIAS=record.rhs_bias is not None,
        ACTIVATION=record.activation,
        ALPHA=record.alpha,
        BETA=record.beta,
        CLAMP_LIMIT=record.limit,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        TILE_LIST_LENGTH=max_num_row_tiles(rows, matrices, config.block_m),
        NUM_PROGRAMS=config.num_programs,
        GROUP_M=GROUP_M,
        PRECISION=choose_dot_precision(grouped_matmul_record),
        WIDEN_TO_FLOAT32=converts_to_float32(record.lhs.dtype),
    )
