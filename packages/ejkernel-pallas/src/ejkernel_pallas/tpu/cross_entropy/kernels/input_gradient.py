"""The kernel of the gradient of the hidden states: logits of a tile again, their gradient, and a second product."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ejkernel_pallas.tpu.cross_entropy.kernels.tile import LossRefs, logit_gradient, product
from ejkernel_pallas.tpu.cross_entropy.spec import LossSpec


def input_gradient(refs: LossRefs, *, spec: LossSpec) -> None:
    """Adds what a tile of entries gives to the gradient of a block of hidden states, and stores it after the last."""
    block, last = pl.program_id(1), spec.num_entry_blocks - 1

    @pl.when(block == 0)
    def _() -> None:
        refs.acc[...] = jnp.zeros_like(refs.acc)

    def add(head: jax.Array) -> None:
        refs.acc[...] += product(logit_gradient(refs, block, spec), head, (1, 1))

    entries_in_last_block = spec.num_entries % spec.block_v
    if not entries_in_last_block:
        add(refs.head[...])
    else:

        @pl.when(block < last)
        def _() -> None:
            add(refs.head[...])

        @pl.when(block == last)
        def _() -> None:
            # Columns past the last entry hold anything, and 0 times NaN is NaN.
            columns = lax.broadcasted_iota(jnp.int32, refs.head.shape, 1)
            head = refs.head[...]
            add(jnp.where(columns < entries_in_last_block, head, jnp.zeros_like(head)))

    @pl.when(block == last)
    def _() -> None:
        refs.gradient[...] = refs.acc[...].astype(refs.gradient.dtype)
