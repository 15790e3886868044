"""Keeps XLA from fusing slices with GPU kernels that change arrays in place.

XLA fuses a kernel on GPUs with the slices that it reads, and with the updates of slices that take its results:

    caches [layers, ...]  ->  dynamic slice  ->  kernel, in place  ->  dynamic update slice  ->  caches [layers, ...]

The fused kernel reads one array and writes another. XLA of JAX 0.11 does this to results that share the memory of an
operand, too: the fusion forgets that they do, and what the kernel leaves alone is missing from the result. Barriers on
both sides keep slices out of such a call. They move nothing by themselves, but a slice is then copied out and back, as
by every XLA without the fusion.
"""

from collections.abc import Callable, Sequence

import jax
from jax import lax


def call_unfused(call: Callable[..., Sequence[jax.Array]], *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the results of `call(*arrays)`, a kernel that changes some of the arrays in place."""
    return lax.optimization_barrier(tuple(call(*lax.optimization_barrier(arrays))))
