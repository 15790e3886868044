"""The kernel of the gradient of the matrix: logits of a tile again, their gradient, and a second product."""

import jax.numpy as jnp
from jax.experimental import pallas as pl

from ejkernel_pallas.tpu.cross_entropy.kernels.tile import LossRefs, logit_gradient, product
from ejkernel_pallas.tpu.cross_entropy.spec import LossSpec


def head_gradient(refs: LossRefs, *, spec: LossSpec) -> None:
    """Adds what a block of tokens gives to the gradient of a block of the matrix, and stores it after the last."""
    block, token_block = pl.program_id(0), pl.program_id(1)

    @pl.when(token_block == 0)
    def _() -> None:
        refs.acc[...] = jnp.zeros_like(refs.acc)

    refs.acc[...] += product(refs.states[...], logit_gradient(refs, block, spec), (0, 0))

    @pl.when(token_block == spec.num_token_blocks - 1)
    def _() -> None:
        refs.gradient[...] = refs.acc[...].astype(refs.gradient.dtype)
