"""The kernels under a simulator of the TPU's copies and memories that watches for races, and that it finds one."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl  # noqa: TID251
from jax.experimental.pallas import tpu as pltpu  # noqa: TID251
from tpu_races import found
from tpu_records import BACKWARD, CASES, FORWARD, answers, close, simulated

from ejkernel.types.pullback import Pullback
from ejkernel_pallas.tpu.tiled_attention.backward import backward
from ejkernel_pallas.tpu.tiled_attention.forward import forward


@pytest.mark.parametrize("name", ["causal", "functions of a shard", "functions of distances"])
def test_tiled_attention_has_no_races(name):
    made = CASES[name]
    output, _, cotangent, gradients = answers(made)

    def attend(made, cotangent):
        got, residuals = forward(made, FORWARD)
        wanted = frozenset(gradients)
        pullback = Pullback(record=made, residuals=residuals, output=got, cotangent=cotangent, grad_fields=wanted)
        return got, backward(pullback, BACKWARD)

    with simulated():
        got, back = jax.block_until_ready(jax.jit(attend)(made, cotangent))
    assert not found()
    close(got, output, made.query.dtype)
    for name, gradient in gradients.items():
        for x, wanted in zip(jax.tree.leaves(back[name]), jax.tree.leaves(gradient), strict=True):
            close(x, wanted, made.query.dtype)


def test_a_planted_race_is_found():
    def reads_too_early(x, out, buffer, arrived):
        copy = pltpu.make_async_copy(x, buffer, arrived)
        copy.start()
        out[...] = buffer[...]
        copy.wait()

    def planted(x):
        return pl.pallas_call(
            reads_too_early,
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
            scratch_shapes=[pltpu.VMEM(x.shape, x.dtype), pltpu.SemaphoreType.DMA],
        )(x)

    with simulated():
        jax.block_until_ready(jax.jit(planted)(jnp.ones((8, 128), jnp.float32)))
    assert found()
