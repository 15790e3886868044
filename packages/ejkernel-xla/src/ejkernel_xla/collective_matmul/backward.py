"""Gradients of collective matmul in XLA: of x by the other collective, and of y by a ring of the array that travels."""

import jax

from ejkernel.families.collective_matmul import CollectiveMatmul
from ejkernel.types.pullback import Pullback
from ejkernel_xla.collective_matmul.config import CollectiveSchedule
from ejkernel_xla.collective_matmul.kernels.products import gathered_product, scattered_product, weight_gradient


def backward(pullback: Pullback, config: CollectiveSchedule) -> dict[str, jax.Array]:
    """Returns gradients of the requested fields of a record.

    Args:
        pullback: Record, cotangent of the output's shape, and the requested names.
        config: The schedule.

    Returns:
        Each requested gradient, in its field's shape and dtype.
    """
    record: CollectiveMatmul = pullback.record
    cotangent = pullback.cotangent.astype(record.x.dtype)
    gathers, grads = record.collective == "all_gather", {}
    if "x" in pullback.grad_fields:
        # The rings of both gradients depend on nothing of each other.
        multiply = scattered_product if gathers else gathered_product
        grads["x"] = multiply(record, cotangent, 0 if record.transpose_y else 1, config)
    if "y" in pullback.grad_fields:
        local_rows, all_rows = (record.x, cotangent) if gathers else (cotangent, record.x)
        gradient = weight_gradient(record, local_rows, all_rows, config)
        is_transposed = gathers == record.transpose_y  # rows of `gradient` are K where x travels, else N
        grads["y"] = (gradient.T if is_transposed else gradient).astype(record.y.dtype)
    return grads
