"""Backward pass of segment pooling in Triton."""

import jax

from ejkernel.families.segment_pooling import SegmentPooling
from ejkernel.types.pullback import Pullback
from ejkernel_triton.launch import ShapeDtype, launch
from ejkernel_triton.segment_pooling.config import PoolingBackward
from ejkernel_triton.segment_pooling.forward import ranges_with_batch_axis
from ejkernel_triton.segment_pooling.spec import make_backward_spec


def backward(pullback: Pullback, config: PoolingBackward) -> dict[str, jax.Array]:
    """Returns gradient of the values.

    Args:
        pullback: Record and cotangent [B, M, H, D].
        config: Tiles and warps.

    Returns:
        `{"values": [B, T, H, D]}`, in the values' dtype.
    """
    from ejkernel_triton.segment_pooling.kernels.pool_bwd import pool_bwd_kernel

    record: SegmentPooling = pullback.record
    spec, rows = make_backward_spec(record, config), record.values.shape[0]
    (gradient,) = launch(
        pool_bwd_kernel,
        (pullback.cotangent.reshape(rows, spec.M, spec.C), record.lengths, ranges_with_batch_axis(record)),
        (ShapeDtype((rows, spec.T, spec.C), record.values.dtype),),
        batch=rows,
        grid=rows * spec.NUM_BLOCKS * spec.NUM_CHANNEL_PROGRAMS,
        num_warps=config.num_warps,
        num_stages=1,
        constants={"spec": spec},
    )
    return {"values": gradient.reshape(record.values.shape)}
