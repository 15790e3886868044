"""Backward pass of gather-reduce in Triton."""

import jax
import jax.numpy as jnp

from ejkernel.families.gather_reduce import GatherReduce, is_valid_index
from ejkernel.types.pullback import Pullback
from ejkernel_triton.gather_reduce.config import GatherTiles
from ejkernel_triton.gather_reduce.forward import with_batch_axis
from ejkernel_triton.gather_reduce.spec import make_spec
from ejkernel_triton.launch import ShapeDtype, launch


def backward(pullback: Pullback, config: GatherTiles) -> dict[str, jax.Array]:
    """Returns the gradients of the rows and of the weights, which one kernel computes.

    Args:
        pullback: Record and cotangent [T, D].
        config: Tiles and warps.

    Returns:
        `{"rows": [R, D], "weights": [T, K]}`, those that are requested, in the dtypes of the fields.
    """
    from ejkernel_triton.gather_reduce.kernels.gather_bwd import gather_bwd_kernel

    record: GatherReduce = pullback.record
    rows, num_terms = record.inverse.shape
    compute_weight_gradient = "weights" in pullback.grad_fields
    spec = make_spec(
        record, config, num_sums=rows, num_terms=num_terms, compute_weight_gradient=compute_weight_gradient
    )
    num_pairs = spec.T * spec.K
    row_gradients, weight_gradient_terms = launch(
        gather_bwd_kernel,
        (
            pullback.cotangent[None],
            record.inverse[None],
            with_batch_axis(record.weights),
            record.rows[None] if compute_weight_gradient else None,
        ),
        (
            ShapeDtype((1, rows, spec.D), record.rows.dtype),
            ShapeDtype((1, spec.NUM_CHANNEL_TILES, num_pairs if compute_weight_gradient else 1), jnp.float32),
        ),
        batch=1,
        grid=spec.NUM_BLOCKS * spec.NUM_CHANNEL_TILES,
        num_warps=config.num_warps,
        num_stages=1,
        constants={"spec": spec},
    )
    gradients = {"rows": row_gradients[0]}
    if compute_weight_gradient:
        assert record.weights is not None  # its gradient is requested
        # No row lists a pair whose index is out of range, so the kernel stored nothing for it.
        valid = is_valid_index(record.indices, spec.R)
        weight_gradient_sum = jnp.where(
            valid, jnp.sum(weight_gradient_terms[0].reshape(spec.NUM_CHANNEL_TILES, spec.T, spec.K), axis=0), 0
        )
        gradients["weights"] = weight_gradient_sum.astype(record.weights.dtype)
    return {name: gradients[name] for name in pullback.grad_fields}
