"""Forward pass of tiled softmax attention in Triton."""

import jax
import jax.numpy as jnp

from ejkernel.families.tiled_attention import SoftmaxResiduals, TiledAttention
from ejkernel.families.tiled_attention.score_terms import functions_as_arguments
from ejkernel.families.tiled_attention.tile_pairs import padding_as_segments, tiles
from ejkernel_triton.launch import ShapeDtype, launch
from ejkernel_triton.tiled_attention.config import TritonForward, forward_tile
from ejkernel_triton.tiled_attention.plan import kernel_operands, plan_key_blocks
from ejkernel_triton.tiled_attention.spec import query_tile_constants


def forward(record: TiledAttention, params: TritonForward) -> tuple[jax.Array, SoftmaxResiduals]:
    """Returns attention output and residuals of a record.

    Args:
        record: The canonical arguments.
        params: Tile sizes, warps and stages.

    Raises:
        ValueError: A tile size is not valid for a kernel.

    Returns:
        Output [B, T, H, Dv] in the query's dtype, and the residuals for the backward pass.
    """
    from ejkernel_triton.tiled_attention.kernels.flash_fwd import flash_fwd_kernel

    tile, record = forward_tile(params), padding_as_segments(functions_as_arguments(record))
    (b, t, h, _), dv = record.query.shape, record.value.shape[3]
    blocks, q_tiles = plan_key_blocks(record, tile.stationary_rows, tile.streamed_rows), tiles(t, tile.stationary_rows)
    outputs = [ShapeDtype((b, t, h, dv), record.query.dtype), ShapeDtype((b, h, t), jnp.float32)]
    constants = {
        **query_tile_constants(record, tile),
        "NUM_TILES": q_tiles,
        "LIST_SHAPE": blocks.list_shape,
        "REVERSE_TILES": record.causal or record.mask_mod is not None,
    }
    if record.normalize_output:
        constants |= {"max_out": None, "argmax_out": None}
    else:
        outputs += [ShapeDtype((b, h, t), jnp.float32), ShapeDtype((b, h, t), jnp.int32)]
    # One program per query tile and query head; consecutive programs are tiles of one head, which share its keys in L2.
    results = launch(
        flash_fwd_kernel,
        kernel_operands(record, blocks),
        outputs,
        batch=b,
        grid=q_tiles * h * b,
        num_warps=tile.warps,
        num_stages=tile.stages,
        constants=constants,
    )
    output, lse = results[:2]
    row_max, row_argmax = results[2:] or (None, None)
    return output, SoftmaxResiduals(lse=lse, row_max=row_max, row_argmax=row_argmax)
