"""Forward pass of segment pooling in Triton."""

import jax
import jax.numpy as jnp

from ejkernel.families.segment_pooling import SegmentPooling
from ejkernel_triton.launch import ShapeDtype, launch
from ejkernel_triton.segment_pooling.config import PoolingForward
from ejkernel_triton.segment_pooling.spec import make_forward_spec


def forward(record: SegmentPooling, config: PoolingForward) -> tuple[jax.Array, tuple[()]]:
    """Returns means of a record.

    Args:
        record: The canonical arguments.
        config: Blocks, tiles and warps.

    Returns:
        [B, M, H, D] in the values' dtype. There are no residuals.
    """
    from ejkernel_triton.segment_pooling.kernels.pool_fwd import pool_fwd_kernel
    from ejkernel_triton.segment_pooling.kernels.split_combine import split_combine_kernel

    spec, (rows, _, heads, head_dim) = make_forward_spec(record, config), record.values.shape
    values, lengths, ranges = (
        record.values.reshape(rows, spec.T, spec.C),
        record.lengths,
        ranges_with_batch_axis(record),
    )
    output, head_and_tail_sums = launch(
        pool_fwd_kernel,
        (values, lengths, ranges),
        (ShapeDtype((rows, spec.M, spec.C), values.dtype), ShapeDtype((rows, spec.NUM_BLOCKS, 2, spec.C), jnp.float32)),
        batch=rows,
        grid=rows * spec.NUM_BLOCKS * spec.NUM_CHANNEL_TILES,
        num_warps=config.num_warps,
        num_stages=1,
        constants={"spec": spec},
    )
    # If blocks are whole chunks, no pool crosses them, and one kernel suffices.
    if spec.HAS_RANGES or spec.TOKENS_PER_BLOCK % spec.CHUNK_SIZE:
        (output,) = launch(
            split_combine_kernel,
            (head_and_tail_sums, lengths, ranges, output),
            # Aliases the first kernel's output, whose pools that cross no block are final.
            (3,),
            batch=rows,
            grid=rows * spec.M * spec.NUM_COMBINE_CHANNEL_TILES,
            num_warps=4,
            num_stages=1,
            constants={"spec": spec},
        )
    return output.reshape(rows, spec.M, heads, head_dim), ()


def ranges_with_batch_axis(record: SegmentPooling) -> jax.Array | None:
    """Returns the ranges with a batch axis of 1, [1, M, 2] int32."""
    return None if record.ranges is None else record.ranges.astype(jnp.int32)[None]
