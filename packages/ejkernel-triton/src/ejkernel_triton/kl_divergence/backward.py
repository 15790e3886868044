"""Backward pass of the divergences in Triton."""

import jax

from ejkernel.families.kl_divergence import KLDivergence
from ejkernel.types.pullback import Pullback
from ejkernel_triton.kl_divergence.config import DivergenceTiles
from ejkernel_triton.kl_divergence.forward import logit_arrays
from ejkernel_triton.kl_divergence.spec import make_spec
from ejkernel_triton.launch import launch


def backward(pullback: Pullback, config: DivergenceTiles) -> dict[str, jax.Array]:
    """Returns the gradient of the student's logits.

    Args:
        pullback: Record, the kernels' residuals, and the cotangents [T] of the divergences; those of the entropies have
            no effect.
        config: Tile and warps.

    Returns:
        `{"student": [T, V]}` in the student's dtype.
    """
    from ejkernel_triton.kl_divergence.kernels.kl_bwd import kl_bwd_kernel

    record: KLDivergence = pullback.record
    factor = record.temperature * pullback.cotangent[0]
    if record.direction == "jsd":
        factor = (1 - record.beta) * factor
    (gradient,) = launch(
        kl_bwd_kernel,
        (*logit_arrays(record), *(x[None] for x in pullback.private_residuals), factor[None]),
        (0,),
        batch=1,
        grid=record.student.shape[0],
        num_warps=config.num_warps,
        num_stages=1,
        constants={"spec": make_spec(record, config)},
    )
    return {"student": gradient[0]}
